#include "engine/prefix_index.h"

#include <algorithm>

#include "base/error.h"

namespace beryl {
namespace {

uint64_t mix(uint64_t z) {   // the finaliser of SplitMix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

uint64_t hash_of(int parent, PrefixIndex::Block ids) {
  uint64_t hash = mix(static_cast<uint64_t>(static_cast<uint32_t>(parent)) + 0x9E3779B97F4A7C15u);
  for (int32_t id : ids) hash = mix(hash + static_cast<uint32_t>(id) + 0x9E3779B97F4A7C15u);
  return hash;
}

}  // namespace

int PrefixIndex::find(int parent, Block ids) const {
  const auto [begin, end] = by_hash_.equal_range(hash_of(parent, ids));
  for (auto each = begin; each != end; ++each)
    if (at(each->second).parent == parent && std::ranges::equal(at(each->second).ids, ids)) return each->second;
  return kNone;
}

int PrefixIndex::find_or_add(int parent, Block ids) {
  int node = find(parent, ids);
  if (node == kNone) {
    if (unused_.empty()) {
      node = static_cast<int>(nodes_.size());
      nodes_.emplace_back();
    } else {
      node = unused_.back();
      unused_.pop_back();
    }
    Node& added = at(node);
    added.parent = parent;
    added.hash = hash_of(parent, ids);
    added.ids.assign(ids.begin(), ids.end());
    added.pages.assign(n_groups_, kNone);
    by_hash_.emplace(added.hash, node);
    if (parent != kNone) ++at(parent).n_children;
  }
  hold(node);
  return node;
}

void PrefixIndex::let_go(int node) {
  BERYL_CHECK(at(node).n_holders > 0, "a node has as many holders as took it");
  --at(node).n_holders;
  remove_if_bare(node);
}

void PrefixIndex::set_page(int node, size_t group, int32_t page) {
  BERYL_CHECK(at(node).pages[group] == kNone, "a node has one page a group");
  at(node).pages[group] = page;
  ++at(node).n_pages;
}

void PrefixIndex::clear_page(int node, size_t group) {
  BERYL_CHECK(at(node).pages[group] != kNone, "only a page that is there can go");
  at(node).pages[group] = kNone;
  --at(node).n_pages;
  remove_if_bare(node);
}

void PrefixIndex::hide(int node) {
  if (at(node).hidden) return;
  const auto [begin, end] = by_hash_.equal_range(at(node).hash);
  by_hash_.erase(std::find_if(begin, end, [&](const auto& each) { return each.second == node; }));
  at(node).hidden = true;
}

void PrefixIndex::remove_if_bare(int node) {
  while (node != kNone && at(node).n_holders == 0 && at(node).n_children == 0 && at(node).n_pages == 0) {
    const int parent = at(node).parent;
    hide(node);
    at(node) = Node();
    unused_.push_back(node);
    if (parent != kNone) --at(parent).n_children;
    node = parent;
  }
}

}  // namespace beryl
