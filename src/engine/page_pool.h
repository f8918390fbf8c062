// The pages of one group of caches: who refers to each, and which hold something worth finding again.
//
// A page is free, in use (one reference a sequence that has it in its table), or idle: nobody refers to it, but the
// prefix index knows what it holds. Idle pages are given up oldest first when no free one is left.
// Invariant: free + idle + in use = all; a page with references is neither free nor idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace beryl {

class PagePool {
 public:
  static constexpr int32_t kNone = -1;

  explicit PagePool(int n_pages);

  int n_pages() const { return static_cast<int>(pages_.size()); }
  int n_free() const { return static_cast<int>(free_.size()); }
  int n_idle() const { return n_idle_; }
  int available() const { return n_free() + n_idle_; }   // what can be taken, once idle pages are given up

  // A free page, with one reference. Requires n_free() > 0.
  int32_t take();
  // One reference more; an idle page is in use again.
  void share(int32_t page);
  // One reference less. Without any a known page becomes idle, the next to be given up if `soon`, else the last; another
  // one becomes free.
  enum class GiveUp : uint8_t { kSoon, kLast };
  void drop(int32_t page, GiveUp when);

  // The prefix index knows the page from now on, or no longer. Requires a reference, or an idle page (forget).
  void remember(int32_t page);
  void forget(int32_t page);

  int32_t oldest_idle() const { return first_; }   // kNone: there is none
  int references(int32_t page) const { return at(page).references; }
  bool known(int32_t page) const { return at(page).known; }

 private:
  struct Page {
    int references = 0;
    bool known = false;
    int32_t previous = kNone, next = kNone;   // among the idle ones
  };
  Page& at(int32_t page) { return pages_[static_cast<size_t>(page)]; }
  const Page& at(int32_t page) const { return pages_[static_cast<size_t>(page)]; }
  bool is_idle(const Page& page) const { return page.references == 0 && page.known; }
  void link(int32_t page, GiveUp when);
  void unlink(int32_t page);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;                 // taken from the back
  int32_t first_ = kNone, last_ = kNone;      // the idle ones, oldest first
  int n_idle_ = 0;
};

}  // namespace beryl
