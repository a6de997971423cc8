#include "controller/http/http_framing.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

namespace kvferry::controller {
namespace {

using State = HttpFraming::State;

/// Passes the bytes to the framing one by one, as from the slowest client. Returns the state after the last byte that
/// was needed.
State read_slowly(HttpFraming& framing, const std::string& bytes) {
  State state = State::kIncomplete;
  for (std::size_t num = 1; num <= bytes.size() && state == State::kIncomplete; ++num)
    state = framing.read(std::string_view(bytes).substr(0, num));
  return state;
}

void expect_size(const std::string& request) {
  for (const std::string& next : {std::string(), std::string("GET / HTTP/1.1\r\n\r\n")}) {
    HttpFraming slow, fast;
    EXPECT_EQ(read_slowly(slow, request + next), State::kComplete) << request;
    EXPECT_EQ(fast.read(request + next), State::kComplete) << request;
    EXPECT_EQ(slow.size(), request.size());
    EXPECT_EQ(fast.size(), request.size());
  }
}

TEST(HttpFraming, FindsTheEndOfARequestHoweverItArrives) {
  expect_size("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
  expect_size("POST /pair HTTP/1.1\r\ncontent-LENGTH: 4\r\n\r\nbody");
  expect_size("POST /pair HTTP/1.1\r\nContent-Length:0\r\n\r\n");
  expect_size(
      "POST /pair HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\nA\r\n0\r\n\r\n 6789\r\n0\r\n\r\n");
}

TEST(HttpFraming, SaysWhoWaitsForContinue) {
  HttpFraming framing;
  const std::string head = "POST / HTTP/1.1\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n";
  EXPECT_EQ(framing.read(head), State::kIncomplete);
  EXPECT_TRUE(framing.awaits_continue());
  EXPECT_EQ(framing.read(head + "body"), State::kComplete);
  for (const char* other : {"Expect: 200-ok", "Expect:", "X-Expect: 100-continue"}) {
    HttpFraming ordinary;
    EXPECT_EQ(ordinary.read(fmt::format("POST / HTTP/1.1\r\nContent-Length: 4\r\n{}\r\n\r\n", other)),
              State::kIncomplete);
    EXPECT_FALSE(ordinary.awaits_continue()) << other;
  }
  HttpFraming upper_case;
  upper_case.read("POST / HTTP/1.1\r\nContent-Length: 4\r\nEXPECT: 100-Continue\r\n\r\n");
  EXPECT_TRUE(upper_case.awaits_continue());
}

TEST(HttpFraming, EndsWithARequestWhoseEndIsNotClear) {
  const std::string head = "POST / HTTP/1.1\r\n";
  const std::string chunked = head + "Transfer-Encoding: chunked\r\n\r\n";
  for (const std::string& bad :
       {head + "Content-Length: -1\r\n\r\n", head + "Content-Length: 4 4\r\n\r\n", head + "Content-Length: x\r\n\r\n",
        head + "Content-Length: 4\r\nContent-Length: 4\r\n\r\n", head + "Content-Length: 99999999999999999999\r\n\r\n",
        head + "Content-Length: 16777217\r\n\r\n", head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        chunked + "-1\r\n", chunked + "ffffffffffffffff\r\n", chunked + "1000001\r\n", chunked + "0\r\nTrailer: x\r\n",
        chunked + std::string(100, '0'), head + std::string(70000, 'x')}) {
    HttpFraming slow, fast;
    EXPECT_EQ(read_slowly(slow, bad), State::kBad) << bad.substr(0, 100);
    EXPECT_EQ(fast.read(bad), State::kBad) << bad.substr(0, 100);
  }
}

}  // namespace
}  // namespace kvferry::controller
