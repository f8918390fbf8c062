// Which pages hold the keys and values of which beginnings of texts: a tree whose nodes are whole pages of ids.
//
// A node stands for all ids from a text's first to the end of its page, since its parent stands for those before: a
// chain of hashes that is compared id by id, so that two texts can never be taken for each other. For each group of
// caches a node names the page that holds its positions, or none. Knows ids and numbers of pages, owns neither.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "ops/program.h"

namespace beryl {

class PrefixIndex {
 public:
  static constexpr int kNone = -1;   // no node; as a parent: the beginning of all texts
  using Block = std::span<const int32_t, kPageTokens>;

  explicit PrefixIndex(size_t n_groups) : n_groups_(n_groups) {}

  int find(int parent, Block ids) const;
  // The node, with one holder more than before.
  int find_or_add(int parent, Block ids);
  // A node without holders, children and pages is no more.
  void hold(int node) { ++at(node).n_holders; }
  void let_go(int node);

  int32_t page(int node, size_t group) const { return at(node).pages[group]; }   // kNone: none
  void set_page(int node, size_t group, int32_t page);
  void clear_page(int node, size_t group);
  // The node is not found any more, nor are those below it; what refers to it may go on doing so.
  void hide(int node);
  int parent(int node) const { return at(node).parent; }

  size_t n_nodes() const { return nodes_.size() - unused_.size(); }

 private:
  struct Node {
    int parent = kNone;
    int n_children = 0, n_holders = 0, n_pages = 0;
    bool hidden = false;
    uint64_t hash = 0;
    std::vector<int32_t> ids;     // [kPageTokens]
    std::vector<int32_t> pages;   // [n_groups]
  };
  Node& at(int node) { return nodes_[static_cast<size_t>(node)]; }
  const Node& at(int node) const { return nodes_[static_cast<size_t>(node)]; }
  void remove_if_bare(int node);

  size_t n_groups_;
  std::vector<Node> nodes_;
  std::vector<int> unused_;                          // places in nodes_
  std::unordered_multimap<uint64_t, int> by_hash_;   // without the hidden ones
};

}  // namespace beryl
