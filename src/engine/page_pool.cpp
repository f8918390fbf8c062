#include "engine/page_pool.h"

#include "base/error.h"

namespace beryl {

PagePool::PagePool(int n_pages) : pages_(static_cast<size_t>(n_pages)) {
  free_.reserve(pages_.size());
  for (int32_t page = n_pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() {
  BERYL_CHECK(!free_.empty(), "a free page is there to be taken");
  const int32_t page = free_.back();
  free_.pop_back();
  at(page).references = 1;
  return page;
}

void PagePool::share(int32_t page) {
  BERYL_CHECK(at(page).references > 0 || at(page).known, "a free page holds nothing to share");
  if (is_idle(at(page))) unlink(page);
  ++at(page).references;
}

void PagePool::drop(int32_t page, GiveUp when) {
  BERYL_CHECK(at(page).references > 0, "a page has as many references as were taken");
  if (--at(page).references > 0) return;
  if (at(page).known) {
    link(page, when);
  } else {
    free_.push_back(page);
  }
}

void PagePool::remember(int32_t page) {
  BERYL_CHECK(at(page).references > 0 && !at(page).known, "a page is remembered once, by who has it");
  at(page).known = true;
}

void PagePool::forget(int32_t page) {
  BERYL_CHECK(at(page).known, "only a known page is forgotten");
  if (is_idle(at(page))) {
    unlink(page);
    free_.push_back(page);
  }
  at(page).known = false;
}

void PagePool::link(int32_t page, GiveUp when) {
  Page& each = at(page);
  const bool soon = when == GiveUp::kSoon;
  each.previous = soon ? kNone : last_;
  each.next = soon ? first_ : kNone;
  (each.previous == kNone ? first_ : at(each.previous).next) = page;
  (each.next == kNone ? last_ : at(each.next).previous) = page;
  ++n_idle_;
}

void PagePool::unlink(int32_t page) {
  Page& each = at(page);
  (each.previous == kNone ? first_ : at(each.previous).next) = each.next;
  (each.next == kNone ? last_ : at(each.next).previous) = each.previous;
  each.previous = each.next = kNone;
  --n_idle_;
}

}  // namespace beryl
