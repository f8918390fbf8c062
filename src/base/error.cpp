#include "base/error.h"

#include <cstdio>
#include <cstdlib>

namespace beryl {

void check_failed(const char* file, int line, const char* condition, const char* what) {
  std::fprintf(stderr, "beryl: internal error at %s:%d: %s (%s)\n", file, line, what, condition);
  std::abort();
}

}  // namespace beryl
