// Tests what a node sends to a controller that does not answer.
#include "controller/client/client_session.h"

#include <gtest/gtest.h>

#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

/// Runs the session in turns of one millisecond. Records the times at which the session gave the connection up.
class Silence {
 public:
  Silence() : client_(options(), [](std::string_view) { return true; }) {}

  std::vector<std::int64_t> given_up_within(std::int64_t ms) {
    std::vector<std::int64_t> times;
    for (const std::int64_t end = now_ms_ + ms; now_ms_ < end; ++now_ms_) {
      if (client_.check_silence(now_ms_ * kMillisecond, events_)) times.push_back(now_ms_);
      client_.send_due(now_ms_ * kMillisecond);
    }
    return times;
  }
  void hear_registered() { client_.receive(encode(wire::Registered{.incarnation = 5}), events_); }
  bool is_registered() const { return client_.is_registered(); }

 private:
  static ClientOptions options() {
    ClientOptions made;
    made.node = node_info("a", 5);
    made.heartbeat_ms = 100;
    made.lost_after_ms = 1000;
    return made;
  }
  ClientSession client_;
  std::int64_t now_ms_ = 0;
  std::vector<ClientEvent> events_;
};

TEST(ClientPatience, GrowsFourfoldWithAControllerThatAnswersNoHello) {
  Silence silence;
  EXPECT_EQ(silence.given_up_within(16'000), (std::vector<std::int64_t>{1001, 3002, 7003, 11'004, 15'005}));
}

TEST(ClientPatience, IsTheSettingAgainAfterAWord) {
  Silence silence;
  silence.given_up_within(4000);
  silence.hear_registered();
  ASSERT_TRUE(silence.is_registered());
  const std::vector<std::int64_t> times = silence.given_up_within(1500);
  ASSERT_EQ(times.size(), 1u) << "a registered node notices a silent controller in lost_after_ms";
  EXPECT_LE(times[0], 4000 + 1000 + 101);
  EXPECT_FALSE(silence.is_registered());
}

TEST(ClientSessionTest, AMessageThatItCantReadIsDroppedAndNamed) {
  ClientOptions options;
  options.node = node_info("a", 5);
  options.controller = "tcp://controller:1";
  ClientSession session(options, [](std::string_view) { return true; });
  std::vector<ClientEvent> events;
  testing::internal::CaptureStderr();
  session.receive("garbage", events);
  const std::string logged = testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find("dropped a message of controller tcp://controller:1 (1 so far): "), std::string::npos)
      << logged;
  session.receive(encode(wire::Registered{.incarnation = 5}), events);
  EXPECT_TRUE(session.is_registered());
}

}  // namespace
}  // namespace kvferry::controller
