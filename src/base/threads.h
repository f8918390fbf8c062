// Threads that the system may refuse.
//
// What can do with fewer takes as many as there are (start_helpers); what cannot ends with a line that says what was to be
// started, which limit stands against it and what would help (start_thread).
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace beryl {

// A thread that has to be; `what` begins the message, for example "the engine's thread". Throws Error(kIo).
std::thread start_thread(std::string_view what, std::function<void()> body);

// Threads 1, 2, ... up to n_threads - 1 that run body(thread), as many as the system lets this process have: those that are missing are
// the last ones. Joined when the vector goes.
std::vector<std::jthread> start_helpers(int n_threads, const std::function<void(int thread)>& body);

// Why the system refused a thread or a process, from its errno: its own word, the limits that it has set for this process, and what
// to do about them. Continues a sentence: "X could not be started: " + ...
std::string refusal_words(int error);

// The limits alone, as "this user may have 3 processes and threads (ulimit -u)"; empty: none is set.
std::string thread_limits_text();

}  // namespace beryl
