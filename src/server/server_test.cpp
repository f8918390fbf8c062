// What: many clients of one server, in one process: each gets its own reply whole, whoever leaves, reads slowly or asks for
//       nonsense; one whose numbers are none gets an error alone; who says nothing holds no place for long; a header of two meanings
//       is refused; the server ends when all is answered, and waits for nobody who does nothing.
// How:  HTTP on real sockets against a backend that checks every page it reads (engine/text_model.h); runs under the thread
//       and address sanitizers as well.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <regex>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/text_model.h"
#include "ops/random_matrix.h"
#include "server/api.h"
#include "server/http_server.h"
#include "server/letter_tokenizer.h"
#include "server/retry_after.h"

namespace beryl::server {
namespace {

std::string text_of(const std::vector<int32_t>& ids) {
  std::string text;
  for (int32_t id : ids) text += static_cast<char>('a' + id);
  return text;
}

// A connection that sends one request and reads until the server is done with it.
class Client {
 public:
  explicit Client(int port) : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~Client() { close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void post(const std::string& path, const std::string& body, const char* connection = "close", const char* version = "1.1") {
    say(fmt::format("POST {} HTTP/{}\r\nHost: localhost\r\nConnection: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}", path,
                    version, connection, body.size(), body));
  }
  void say(const std::string& text) { EXPECT_TRUE(try_to_say(text)); }
  bool try_to_say(const std::string& text) {
    return send(socket_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  // What is sent to it and not read fills the room for it soon.
  void take_little() {
    const int bytes = 2048;
    EXPECT_EQ(setsockopt(socket_, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes), 0);
  }
  void say_no_more() { EXPECT_EQ(shutdown(socket_, SHUT_WR), 0); }
  std::string read_until(const std::string& end) {
    std::string all;
    while (!all.ends_with(end)) {
      const std::string next = read(1);
      if (next.empty()) break;
      all += next;
    }
    return all;
  }
  // At most so many bytes; less: the connection was closed.
  std::string read(size_t most = SIZE_MAX) {
    std::string all;
    char buffer[4096];
    while (all.size() < most) {
      const ssize_t n = recv(socket_, buffer, std::min(sizeof buffer, most - all.size()), 0);
      if (n <= 0) break;
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  int socket_;
};

// Looks again and again; false: not within some seconds.
bool comes_true(const std::function<bool()>& what) {
  for (int i = 0; i < 1000 && !what(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return what();
}

int status_of(const std::string& answer) { return answer.starts_with("HTTP/1.1 ") ? std::stoi(answer.substr(9)) : 0; }

// The texts of a completion, whole or in chunks.
std::string text_in(const std::string& answer) {
  std::string text;
  for (size_t at = answer.find("\"text\":\""); at != std::string::npos; at = answer.find("\"text\":\"", at)) {
    at += 8;
    text += answer.substr(at, answer.find('"', at) - at);
  }
  return text;
}

class ServerTest : public testing::Test {
 protected:
  ServerTest() : tokenizer_(letter_tokenizer()), constraints_(*tokenizer_, test::kTextVocab), forms_(constraints_), program_(test::text_program(100)) {
    EngineLimits limits;
    limits.run.context = 512;
    limits.run.n_sequences = 6;
    limits.run.chunk_tokens = 64;
    limits.run.cache_tokens = 1024;
    limits.run.kept_windows = 2;
    limits.max_waiting = 100;
    limits.always_draft = true;
    engine_ = std::make_unique<Engine>(program_, limits, backend_);
    model_ = std::make_unique<ServedModel>(ServedModel{
        .id = "letters", .tokenizer = *tokenizer_, .forms = forms_, .engine = *engine_, .suppressed_ids = {}, .vocab = test::kTextVocab});
    start(HttpLimits(), ApiOptions());
  }

  void start(const HttpLimits& limits, const ApiOptions& options) {
    server_ = nullptr;
    api_ = std::make_unique<Api>(*model_, options);
    server_ = std::make_unique<HttpServer>("127.0.0.1", 0, limits, api_->handlers());
  }

  std::string ask(const std::string& body) {
    Client client(server_->port());
    client.post("/v1/completions", body);
    return client.read();
  }

  std::unique_ptr<Tokenizer> tokenizer_;
  ConstraintCompiler constraints_;
  FormCompiler forms_;
  Program program_;
  test::TextBackend backend_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<ServedModel> model_;
  std::unique_ptr<Api> api_;
  std::unique_ptr<HttpServer> server_;   // ends first
};

TEST_F(ServerTest, EveryClientGetsItsOwnReply) {
  constexpr int kClients = 64, kRequests = 6;
  std::atomic<int> n_right = 0, n_left = 0, n_failed = 0;
  const auto client = [&](uint64_t seed) {
    RandomStream random(seed);
    for (int i = 0; i < kRequests; ++i) {
      std::vector<int32_t> prompt(static_cast<size_t>(1 + random.below(150)));
      const bool alike = random.below(2) == 0;
      for (size_t j = 0; j < prompt.size(); ++j)
        prompt[j] = alike && j < 128 ? static_cast<int32_t>(j % 17) : random.below(test::kPoison);
      const int64_t max_new = 1 + random.below(80);
      const bool poisoned = random.below(10) == 0;
      if (poisoned) prompt.back() = test::kPoison;
      const std::string body = fmt::format(R"({{"prompt": "{}", "max_tokens": {}, "temperature": 0, "stream": {}}})", text_of(prompt),
                                           max_new, random.below(2) == 0);
      if (random.below(6) == 0) {
        Client leaving(server_->port());
        leaving.post("/v1/completions", body);
        if (random.below(2) == 0) leaving.read(40);
        ++n_left;
        continue;
      }
      const std::string answer = ask(body);
      if (poisoned) {
        EXPECT_NE(answer.find("no finite numbers"), std::string::npos) << answer;
        ++n_failed;
        continue;
      }
      EXPECT_EQ(status_of(answer), 200) << answer;
      EXPECT_EQ(text_in(answer), text_of(test::text_model_reply(prompt, max_new, {}, {}, 512)));
      ++n_right;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) threads.emplace_back(client, static_cast<uint64_t>(i + 1));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_right + n_left + n_failed, kClients * kRequests);
  EXPECT_GT(n_right, 100);
  EXPECT_GT(n_left, 10);
  EXPECT_GT(n_failed, 10);
  server_->stop_accepting();
  engine_->drain();
  const EngineCounts counts = engine_->counts();
  EXPECT_EQ(counts.n_free_pages, counts.n_pages);
}

TEST_F(ServerTest, RepliesOfAFormAreThoseGivenAlone) {
  if (!has_constraints()) GTEST_SKIP() << "a build without structured output";
  // The vocabulary has no end of text: a reply ends where nothing may follow.
  const std::string forms[] = {"(abc|de)+f{1,3}", "[a-h]{5,40}w", "(ab?c?d?)*efg", "(a|b|c){30}"};
  const auto body = [&](uint64_t seed, size_t form, bool stream) {
    return fmt::format(R"({{"prompt": "{}", "max_tokens": 200, "seed": {}, "stream": {}, "response_format": {{"type": "regex", "pattern": "{}"}}}})",
                       text_of({static_cast<int32_t>(seed % 20), 1, 2, 3}), seed, stream, forms[form]);
  };
  std::map<std::pair<uint64_t, size_t>, std::string> alone;
  for (uint64_t seed = 0; seed < 10; ++seed)
    for (size_t form = 0; form < std::size(forms); ++form) {
      const std::string answer = ask(body(seed, form, false));
      ASSERT_EQ(status_of(answer), 200) << answer;
      const std::string text = text_in(answer);
      const bool is_whole = answer.find("\"finish_reason\":\"stop\"") != std::string::npos;
      EXPECT_EQ(is_whole, std::regex_match(text, std::regex(forms[form]))) << text;
      EXPECT_EQ(is_whole, text.size() < 200) << text;
      alone[{seed, form}] = text;
    }
  std::atomic<int> n_right = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 8; ++thread)
    threads.emplace_back([&, thread] {
      RandomStream random(thread + 1);
      for (int i = 0; i < 20; ++i) {
        const auto seed = static_cast<uint64_t>(random.below(10));
        const auto form = static_cast<size_t>(random.below(4));
        if (random.below(5) == 0) {
          Client leaving(server_->port());
          leaving.post("/v1/completions", body(seed, form, true));
          continue;
        }
        const std::string answer = ask(body(seed, form, random.below(2) == 0)), &expected = alone[{seed, form}];
        EXPECT_EQ(text_in(answer), expected);
        ++n_right;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(n_right, 100);
  EXPECT_EQ(status_of(ask(R"({"prompt": "a", "response_format": {"type": "regex", "pattern": "("}})")), 400);
  engine_->drain();
  EXPECT_EQ(engine_->counts().n_free_pages, engine_->counts().n_pages);
}

TEST_F(ServerTest, NonsenseIsAnswered) {
  for (const std::string body : {"", "{", "[]", R"({"prompt": 5})", R"({"prompt": "abc", "max_tokens": "x"})", R"({"prompt": [99]})"})
    EXPECT_EQ(status_of(ask(body)), 400) << body;
  // Bytes that are no HTTP at all, and a connection that says nothing.
  RandomStream random(1);
  for (int i = 0; i < 50; ++i) {
    Client client(server_->port());
    std::string path;
    for (int n = random.below(40); n > 0; --n) path += static_cast<char>(1 + random.below(255));
    client.post(path, "{}");
  }
  { const Client silent(server_->port()); }
  EXPECT_EQ(text_in(ask(R"({"prompt": "abc", "max_tokens": 3, "temperature": 0})")),
            text_of(test::text_model_reply({0, 1, 2}, 3, {}, {}, 512)));
}

TEST_F(ServerTest, AStreamShowsThatItLivesWhileAPromptIsRead) {
  const std::vector<int32_t> prompt(400, 5);   // 7 chunks
  model_->sign_of_life = std::chrono::milliseconds(1);
  backend_.most_rows = 3 * 64;   // as if each of the others took very long
  Client client(server_->port());
  client.post("/v1/completions", fmt::format(R"({{"prompt": "{}", "max_tokens": 20, "temperature": 0, "stream": true}})", text_of(prompt)));
  std::string answer;
  for (int i = 0; i < 3; ++i) answer += client.read_until(": waiting\n\n");
  EXPECT_EQ(status_of(answer), 200);
  EXPECT_TRUE(answer.ends_with(": waiting\n\n")) << answer;
  EXPECT_EQ(text_in(answer), "");   // no token yet
  EXPECT_LE(backend_.n_rows, 3 * 64);
  backend_.most_rows = INT64_MAX;
  answer += client.read();
  EXPECT_EQ(text_in(answer), text_of(test::text_model_reply(prompt, 20, {}, {}, 512)));
  EXPECT_NE(answer.find("data: [DONE]"), std::string::npos);
}

TEST_F(ServerTest, AClientThatSaysNoMoreHearsItsAnswer) {
  for (const bool stream : {false, true}) {
    const std::vector<int32_t> prompt(200, stream ? 5 : 6);
    backend_.most_rows = backend_.n_rows + 64;   // the prompt takes long
    Client client(server_->port());
    client.post("/v1/completions",
                fmt::format(R"({{"prompt": "{}", "max_tokens": 20, "temperature": 0, "stream": {}}})", text_of(prompt), stream));
    client.say_no_more();
    std::string answer = client.read_until(stream ? ": waiting\n\n" : "\r\n\r\n");   // is it still there?
    EXPECT_EQ(status_of(answer), stream ? 200 : 100);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));   // it is looked at again
    backend_.most_rows = INT64_MAX;
    answer = client.read();
    EXPECT_EQ(status_of(answer), stream ? 0 : 200);
    EXPECT_EQ(text_in(answer), text_of(test::text_model_reply(prompt, 20, {}, {}, 512))) << answer;
  }
  EXPECT_EQ(engine_->counts().finished[static_cast<size_t>(FinishReason::kCancelled)], 0);
}

TEST_F(ServerTest, AClientThatIsGoneIsNoticedBeforeItsReplyGoesOn) {
  int n_gone = 0;
  for (const bool stream : {false, true})
    for (const char* version : {"1.1", "1.0"}) {
      backend_.most_rows = backend_.n_rows + 64;
      {
        Client leaving(server_->port());
        const std::string prompt = text_of(std::vector<int32_t>(200, n_gone));   // of which the caches know nothing
        leaving.post("/v1/completions", fmt::format(R"({{"prompt": "{}", "max_tokens": 200, "stream": {}}})", prompt, stream), "close", version);
        EXPECT_TRUE(comes_true([&] { return server_->n_active() == 1; }));
      }
      EXPECT_TRUE(comes_true([&] { return server_->n_active() == 0; })) << version << (stream ? " stream" : " whole");
      backend_.most_rows = INT64_MAX;
      ++n_gone;
      EXPECT_TRUE(comes_true([&] { return engine_->counts().finished[static_cast<size_t>(FinishReason::kCancelled)] == n_gone; }));
    }
}

TEST_F(ServerTest, WhoSaysNothingHoldsNoPlaceForLong) {
  HttpLimits limits;
  limits.header_time = std::chrono::milliseconds(300);
  limits.idle_time = std::chrono::milliseconds(1500);
  start(limits, {});
  Client polite(server_->port()), silent(server_->port()), dribbling(server_->port()), slow_body(server_->port());
  polite.post("/tokenize", R"({"content": "ab"})", "keep-alive");
  EXPECT_EQ(status_of(polite.read_until("\"count\":2}")), 200);
  slow_body.say("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n");
  const auto begin = std::chrono::steady_clock::now();
  const auto ms_since = [&] { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count(); };
  double header_ms = 0, body_ms = 0;
  dribbling.say("GET /health HTTP/1.1\r\nX-Long: ");
  while (ms_since() < 5000 && body_ms == 0) {
    if (header_ms == 0 && !dribbling.try_to_say("y")) header_ms = ms_since();
    if (!slow_body.try_to_say(" ")) body_ms = ms_since();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (header_ms == 0 || ms_since() > header_ms + 400) continue;
    polite.post("/tokenize", R"({"content": "abc"})", "keep-alive");   // between two requests there is more time
    EXPECT_EQ(status_of(polite.read_until("\"count\":3}")), 200);
  }
  EXPECT_GE(header_ms, 200);
  EXPECT_LT(header_ms, 1400);
  EXPECT_GE(body_ms, 1400);
  EXPECT_LT(body_ms, 4000);
  EXPECT_EQ(silent.read(), "");
  EXPECT_EQ(polite.read(), "");   // closed in the end
}

TEST_F(ServerTest, AnIdleConnectionMakesRoomForANewOne) {
  HttpLimits limits;
  limits.max_connections = 3;
  start(limits, {});
  const auto asks = [&](Client& client) {
    client.post("/tokenize", R"({"content": "ab"})", "keep-alive");
    const int status = status_of(client.read_until("\"count\":2}"));
    EXPECT_TRUE(comes_true([&] { return server_->n_active() == 0; }));   // it is idle from now on
    return status;
  };
  Client first(server_->port()), second(server_->port()), silent(server_->port());
  EXPECT_EQ(asks(first), 200);
  EXPECT_EQ(asks(second), 200);
  EXPECT_EQ(asks(first), 200);
  Client third(server_->port());   // instead of the second, which is idle the longest
  EXPECT_EQ(asks(third), 200);
  EXPECT_EQ(second.read(), "");
  EXPECT_EQ(asks(first), 200);
  Client fourth(server_->port());
  EXPECT_EQ(asks(fourth), 200);
  EXPECT_EQ(third.read(), "");
  // Nobody goes who is asking or has just come.
  backend_.most_rows = 0;
  for (Client* each : {&first, &fourth}) each->post("/v1/completions", R"({"prompt": "abc", "max_tokens": 3, "temperature": 0})", "keep-alive");
  EXPECT_TRUE(comes_true([&] { return server_->n_active() == 2; }));
  Client extra(server_->port());
  extra.post("/tokenize", R"({"content": "ab"})");
  EXPECT_EQ(status_of(extra.read()), 503);
  backend_.most_rows = INT64_MAX;
  for (Client* each : {&first, &fourth}) EXPECT_EQ(status_of(each->read_until("}}")), 200);
  EXPECT_EQ(asks(silent), 200);
}

TEST(RetryAfter, IsWhenThoseThatWaitWillHaveBeenLetIn) {
  EXPECT_EQ(retry_after_seconds(0, 0, 0), 1);
  EXPECT_EQ(retry_after_seconds(0, 100, 10), 1);     // only a place was missing
  EXPECT_EQ(retry_after_seconds(64, 640, 60), 6);
  EXPECT_EQ(retry_after_seconds(64, 630, 60), 7);    // rounded up: who comes too early is sent away again
  EXPECT_EQ(retry_after_seconds(3, 1, 10), 30);
  EXPECT_EQ(retry_after_seconds(3, 0, 10), 30);      // none has ended so far
  EXPECT_EQ(retry_after_seconds(64, 1, 60), 60);
  EXPECT_EQ(retry_after_seconds(1 << 20, 0, 1e9), 60);
}

TEST(RetryAfter, IsMeasuredOverTheLastMinuteOfWork) {
  FinishRate rate;
  EXPECT_EQ(rate.retry_after(64, 0, 0), 1);
  EXPECT_EQ(rate.retry_after(2, 4, 20), 10);         // of four in twenty seconds
  for (int second = 1; second <= 100; ++second) rate.note(second, second);            // one a second
  EXPECT_EQ(rate.retry_after(8, 100, 100), 8);
  for (int second = 101; second <= 400; ++second) rate.note(100 + 10 * (second - 100), second);   // then ten
  EXPECT_EQ(rate.retry_after(50, 3100, 400), 5);
}

TEST_F(ServerTest, AKeyIsLookedAtBeforeTheBody) {
  start(HttpLimits(), {.keys = {"right"}});
  const auto header = [](const char* key, int64_t n_bytes, const char* more) {
    return fmt::format("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n{}\r\n", key, n_bytes, more);
  };
  const std::string body = R"({"content": "ab"})";
  const auto size = static_cast<int64_t>(body.size());
  // A large body is not waited for, nor one that the client asks about first.
  for (const auto& [n_bytes, more] : {std::pair{7 << 20, ""}, std::pair{1 << 30, ""}, std::pair{17, "Expect: 100-continue\r\n"}}) {
    Client client(server_->port());
    client.say(header("wrong", n_bytes, more));
    EXPECT_EQ(status_of(client.read()), 401) << n_bytes;   // and closed
  }
  // Behind a small one the connection goes on.
  Client client(server_->port());
  client.say(header("wrong", size, "") + body);
  EXPECT_EQ(status_of(client.read_until("}}")), 401);
  client.say(header("right", size, "") + body);
  EXPECT_EQ(status_of(client.read_until("\"count\":2}")), 200);
}

TEST_F(ServerTest, AHeaderOfTwoMeaningsIsRefusedAndNothingBehindItIsRead) {
  const std::string host = "Host: localhost\r\n", hidden = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
  const std::pair<int, std::string> headers[] = {
      {400, host + "Content-Length: 0\r\nContent-Length: 60\r\n"},
      {400, host + "Content-Length: 60\r\nContent-Length: 60\r\n"},
      {400, host + "Content-Length : 60\r\n"},
      {400, host + "Content-Length\t: 60\r\n"},
      {400, host + "X y: 1\r\n"},
      {400, host + "X: a\rTransfer-Encoding: chunked\r\n"},
      {400, host + "Content-Length: 60\r\nTransfer-Encoding: chunked\r\n"},
      {400, host + "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n"},
      {400, host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"},
      {400, host + "Transfer-Encoding: chunked, chunked\r\n"},
      {501, host + "Transfer-Encoding: xchunked\r\n"},
      {501, host + "Transfer-Encoding: gzip, chunked\r\n"},
      {501, host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"},
      {400, host + "Content-Length: -5\r\n"},
      {400, host + "Content-Length: +30\r\n"},
      {400, host + "Content-Length: 30, 30\r\n"},
      {400, host + "Content-Length: 0x10\r\n"},
      {400, host + "Content-Length: \r\n"},
      {413, host + "Content-Length: 99999999999999999999\r\n"},
      {400, ""},
      {400, host + "Host: evil.example\r\n"},
      {400, host + host},
  };
  for (const char* path : {"/v1/completions", "/v1/messages"})
    for (const auto& [status, header] : headers) {
      Client client(server_->port());
      client.say(fmt::format("POST {} HTTP/1.1\r\n{}\r\n", path, header) + hidden);
      const std::string answer = client.read();   // to the end: it is closed
      EXPECT_EQ(status_of(answer), status) << header << answer;
      EXPECT_EQ(answer.find("HTTP/1.1", 1), std::string::npos) << header << answer;
      EXPECT_NE(answer.find("Content-Type: application/json\r\n"), std::string::npos) << header << answer;
      EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos) << header << answer;
      const char* const begin = std::string_view(path) == "/v1/messages" ? "\r\n\r\n{\"type\":\"error\",\"error\":{" : "\r\n\r\n{\"error\":{";
      EXPECT_NE(answer.find(begin), std::string::npos) << header << answer;
    }
  Client chunks(server_->port());
  chunks.say("POST /tokenize HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\nzz\r\n");
  EXPECT_EQ(status_of(chunks.read()), 400);
  // What has one meaning is read.
  const std::string body = R"({"content": "ab"})";
  for (const std::string& header : {host + fmt::format("Content-Length: {}\r\n\r\n", body.size()) + body,
                                    host + fmt::format("Transfer-Encoding: Chunked\r\n\r\n{:x}\r\n{}\r\n0\r\n\r\n", body.size(), body),
                                    fmt::format("Host:\r\ncontent-length: {}\r\n\r\n", body.size()) + body}) {
    Client client(server_->port());
    client.say("POST /tokenize HTTP/1.1\r\n" + header);
    EXPECT_EQ(status_of(client.read_until("\"count\":2}")), 200) << header;
  }
  Client old(server_->port());
  old.say("GET /v1/models HTTP/1.0\r\n\r\n");
  EXPECT_EQ(status_of(old.read()), 200);
}

TEST_F(ServerTest, AFailedDeviceIsNoFaultOfAClientThatBansTokens) {
  const std::string body = R"({"prompt": "abc", "max_tokens": 50, "logit_bias": {"3": -100}})";
  backend_.fails_at = 3;
  const std::string answer = ask(body);
  EXPECT_EQ(status_of(answer), 500) << answer;
  EXPECT_NE(answer.find("device has failed"), std::string::npos) << answer;
  EXPECT_EQ(status_of(ask(body)), 200);
}

TEST_F(ServerTest, AServerThatEndsWaitsForNobodyWhoDoesNothing) {
  HttpLimits limits;
  limits.header_time = std::chrono::milliseconds(1000);
  start(limits, {});
  Client silent(server_->port()), half_header(server_->port()), half_body(server_->port()), deaf(server_->port()), late(server_->port());
  half_header.say("POST /v1/comp");
  half_body.say("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{");
  deaf.take_little();
  deaf.post("/v1/completions", R"({"prompt": ["abc", "bcd", "cde", "def"], "max_tokens": 400, "temperature": 0, "stream": true, "n": 64, "logprobs": 20})");   // megabytes
  late.post("/tokenize", R"({"content": "ab"})", "keep-alive");
  EXPECT_EQ(status_of(late.read_until("\"count\":2}")), 200);
  EXPECT_TRUE(comes_true([&] { return engine_->counts().finished[static_cast<size_t>(FinishReason::kLength)] == 256; }));
  backend_.most_rows = backend_.n_rows + 10;    // what this one wants takes long
  Client reader(server_->port());
  reader.post("/v1/completions", R"({"prompt": "abcdefg", "max_tokens": 400, "temperature": 0, "stream": true})");
  EXPECT_TRUE(comes_true([&] { return server_->n_active() == 3; }));

  api_->set_draining();
  server_->stop_accepting();
  const auto begin = std::chrono::steady_clock::now();
  const auto ms_since = [&] { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count(); };
  // A body that comes byte by byte, also of a connection that was between two requests.
  late.say("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{");
  while (ms_since() < 5000 && (half_body.try_to_say(" ") || late.try_to_say(" "))) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_LT(ms_since(), 3000);
  EXPECT_TRUE(comes_true([&] { return server_->n_active() == 1; }));
  EXPECT_LT(ms_since(), 5000);
  backend_.most_rows = INT64_MAX;
  EXPECT_EQ(text_in(reader.read()), text_of(test::text_model_reply({0, 1, 2, 3, 4, 5, 6}, 400, {}, {}, 512)));
  EXPECT_TRUE(comes_true([&] { return server_->n_active() == 0; }));
}

TEST_F(ServerTest, ADrainedServerRefusesAndFinishes) {
  Client client(server_->port()), late(server_->port());
  client.post("/v1/completions", R"({"prompt": "abcdefg", "max_tokens": 400, "temperature": 0, "stream": true})");
  const std::string begin = client.read(20);
  late.post("/tokenize", R"({"content": "ab"})", "keep-alive");   // so that it has been let in
  EXPECT_EQ(status_of(late.read_until("\"count\":2}")), 200);
  api_->set_draining();
  server_->stop_accepting();
  engine_->drain();
  late.post("/v1/completions", R"({"prompt": "abc", "max_tokens": 3})");
  EXPECT_EQ(status_of(late.read()), 503);
  const std::string answer = begin + client.read();
  EXPECT_EQ(text_in(answer), text_of(test::text_model_reply({0, 1, 2, 3, 4, 5, 6}, 400, {}, {}, 512)));
  EXPECT_NE(answer.find("data: [DONE]"), std::string::npos);
}

}  // namespace
}  // namespace beryl::server
