#include "base/threads.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {
namespace {

// The smallest "pids.max" of this process's control group (v2) and its ancestors; -1: none.
int64_t group_limit() {
  int64_t smallest = -1;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    for (std::string group = line.substr(3);; group.resize(group.rfind('/'))) {
      if (group == "/") group.clear();
      int64_t limit = 0;
      std::ifstream file("/sys/fs/cgroup" + group + "/pids.max");
      if (file >> limit && (smallest < 0 || limit < smallest)) smallest = limit;   // "max" is no number
      if (group.empty()) break;
    }
  }
  return smallest;
}

}  // namespace

std::string thread_limits_text() {
  std::string text;
  const auto add = [&](std::string limit) { text += (text.empty() ? "" : ", ") + std::move(limit); };
  rlimit limit = {};
  // The superuser is not held to it.
  if (geteuid() != 0 && getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    add(fmt::format("this user may have {} processes and threads (ulimit -u)", limit.rlim_cur));
  if (const int64_t pids = group_limit(); pids >= 0) add(fmt::format("this control group {} (pids.max)", pids));
  // A thread's stack is address space.
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    add(fmt::format("this process {:.1f} GB of address space (ulimit -v)", static_cast<double>(limit.rlim_cur) * 1e-9));
  return text;
}

std::string refusal_words(int error) {
  std::string text = std::strerror(error);
  const std::string limits = thread_limits_text();
  if (error == EAGAIN || error == ENOMEM)
    text += limits.empty() ? "; the machine has no room for another thread: end other programs"
                           : fmt::format("; {}: raise that, or end other programs", limits);
  return text;
}

std::thread start_thread(std::string_view what, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kIo, fmt::format("{} could not be started: {}", what, refusal_words(error.code().value())));
  }
}

std::vector<std::jthread> start_helpers(int n_threads, const std::function<void(int thread)>& body) {
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<size_t>(n_threads > 1 ? n_threads - 1 : 0));
  try {
    for (int thread = 1; thread < n_threads; ++thread) threads.emplace_back([body, thread] { body(thread); });
  } catch (const std::system_error&) {
  }
  return threads;
}

}  // namespace beryl
