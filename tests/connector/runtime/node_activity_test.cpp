// Tests how the flight recorder's events become the report that the controller shows.
#include "connector/runtime/links/node_activity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class NodeActivityTest : public ::testing::Test {
 protected:
  void transfer(LifeKind kind, const std::string& peer, std::uint64_t bytes, std::uint32_t num_failed = 0) {
    LifeEvent& event =
        recorder_.add(1, kind, now_, LifeEvent::because(num_failed > 0 ? Cause::kTooSlow : Cause::kNone));
    event.peer = peer;
    event.path = "tcp";
    event.bytes = bytes;
    event.duration = kSecond / 2;
    event.failed = num_failed;
  }
  void arrive(std::string_view prefix, std::uint32_t num_handed_over = 0) {
    LifeEvent& event = recorder_.add(1, LifeKind::kArrived, now_);
    event.prefix = prefix;
    event.expected = num_handed_over;
  }
  controller::NodeReport report() {
    controller::NodeReport made;
    activity_.read(recorder_);
    activity_.add_to(made, now_);
    return made;
  }

  TimeNs now_ = 100 * kSecond;
  FlightRecorder recorder_{64, 8};
  NodeActivity activity_;
};

TEST_F(NodeActivityTest, APushThatMovedNothingIsNoPathUnlessItFailed) {
  transfer(LifeKind::kPushed, "tcp://a:1", 0);
  EXPECT_THAT(report().paths, SizeIs(0)) << "the peer reports the pulls of what was announced";
  transfer(LifeKind::kPushed, "tcp://a:1", 0, 1);
  EXPECT_THAT(report().paths, SizeIs(1));
}

TEST_F(NodeActivityTest, EachPeerAndDirectionIsAPath) {
  transfer(LifeKind::kPulled, "tcp://a:1", 3'000'000'000);
  transfer(LifeKind::kPulled, "tcp://a:1", 1'000'000'000, 2);
  now_ += kSecond;
  transfer(LifeKind::kPushed, "tcp://a:1", 500);
  const controller::NodeReport told = report();
  ASSERT_THAT(told.paths, SizeIs(2));
  EXPECT_TRUE(told.paths[0].is_push) << "the last one first";
  EXPECT_EQ(told.paths[1].peer, "tcp://a:1");
  EXPECT_EQ(told.paths[1].path, "tcp");
  EXPECT_EQ(told.paths[1].bytes, 4'000'000'000u);
  EXPECT_EQ(told.paths[1].num_failed, 2u);
  EXPECT_NEAR(told.paths[1].gb_per_s, 4.0 / 3 * std::exp(-1.0 / 3), 0.001);
  EXPECT_EQ(told.paths[1].last_gb_per_s, 2.0);
  now_ += 60 * kSecond;
  EXPECT_LT(report().paths[1].gb_per_s, 0.001) << "nothing moves any more";
  EXPECT_EQ(report().paths[1].bytes, 4'000'000'000u) << "no event counts twice";
}

TEST_F(NodeActivityTest, TheFastestOfTheLastLargePullsIsTold) {
  // A limit of 2 GB/s, so that a pull of 10 MB is large.
  const auto pull = [this](std::uint64_t bytes, TimeNs duration, std::string_view path = "tcp",
                           LifeKind kind = LifeKind::kPulled) {
    LifeEvent& event = recorder_.add(1, kind, now_);
    event.peer = std::string_view("tcp://a:1");
    event.path = path;
    event.bytes = bytes;
    event.duration = duration;
    event.limit_mb_per_s = 2000;
    return report().paths[0];
  };
  for (int i = 0; i < 20; ++i) EXPECT_EQ(pull(9'000'000, 9 * kMillisecond).best_gb_per_s, 0) << "none is large";
  for (int i = 0; i < 3; ++i) EXPECT_EQ(pull(10'000'000, 20 * kMillisecond).best_gb_per_s, 0) << "too few";
  EXPECT_EQ(pull(30'000'000, 20 * kMillisecond).best_gb_per_s, 1.5);
  EXPECT_EQ(pull(10'000'000, 20 * kMillisecond).limit_gb_per_s, 2);
  for (int i = 0; i < 14; ++i) EXPECT_EQ(pull(10'000'000, 20 * kMillisecond).best_gb_per_s, 1.5);
  EXPECT_EQ(pull(10'000'000, 20 * kMillisecond).best_gb_per_s, 0.5) << "the fastest is one of the last sixteen no more";
  EXPECT_EQ(pull(10'000'000, 20 * kMillisecond, "ucx").best_gb_per_s, 0) << "another path begins anew";
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(pull(10'000'000, 20 * kMillisecond, "ucx", LifeKind::kPushed).best_gb_per_s, 0) << "a push";
}

TEST_F(NodeActivityTest, TheMemoryAndTheReasonForItAreTold) {
  const auto pull = [this](std::uint32_t in_frames, std::string_view note, std::uint32_t failed = 0) {
    LifeEvent& event = recorder_.add(1, LifeKind::kPulled, now_);
    event.peer = std::string_view("tcp://a:1");
    event.in_frames = in_frames;
    event.note = note;
    event.failed = failed;
    return report().paths[0].memory;
  };
  EXPECT_EQ(pull(0, ""), "host slots");
  EXPECT_EQ(pull(0, "no path\n"), "host slots: no path?");
  EXPECT_EQ(pull(3, ""), "GPU to GPU");
  EXPECT_EQ(pull(3, "no frame was free"), "GPU to GPU, and host slots: no frame was free");
  EXPECT_EQ(pull(3, "the connection broke", 1), "GPU to GPU") << "the reason of a failure is no reason for a path";
}

TEST_F(NodeActivityTest, OnlyTheLastPathsAreTold) {
  for (int i = 0; i < 100; ++i) {
    now_ += kMillisecond;
    transfer(LifeKind::kPulled, fmt::format("tcp://a:{}", i), 1);
    report();
  }
  const controller::NodeReport told = report();
  ASSERT_THAT(told.paths, SizeIs(controller::kReportPathsMax));
  EXPECT_EQ(told.paths[0].peer, "tcp://a:99");
  EXPECT_EQ(told.paths[15].peer, "tcp://a:84");
}

TEST_F(NodeActivityTest, EventsThatWereOverwrittenAreMissing) {
  for (int i = 0; i < 200; ++i) transfer(LifeKind::kPulled, "tcp://a:1", 1);
  EXPECT_EQ(report().paths[0].bytes, 64u);
  transfer(LifeKind::kPulled, "tcp://a:1", 1);
  EXPECT_EQ(report().paths[0].bytes, 65u);
}

TEST_F(NodeActivityTest, FailuresHaveTheirReasonAndANewPromptIsNone) {
  recorder_.add(1, LifeKind::kFetchFailed, now_, LifeEvent::because(Cause::kNoHolder));
  recorder_.add(1, LifeKind::kAdmitted, now_, LifeEvent::because(Cause::kNoHolder));
  EXPECT_THAT(report().failures, IsEmpty());
  for (int i = 0; i < 6; ++i) transfer(LifeKind::kPushed, fmt::format("tcp://a:{}", i), 0, 1);
  LifeEvent& event = recorder_.add(1, LifeKind::kFetchFailed, now_, LifeEvent::because(Cause::kRefused));
  event.note = "words of \x1b[31manother node";
  now_ += 2 * kSecond;
  const controller::NodeReport told = report();
  EXPECT_EQ(told.num_failures, 7u);
  ASSERT_THAT(told.failures, SizeIs(controller::kReportFailuresMax));
  EXPECT_EQ(told.failures[0].what,
            "the other node refused to lease or to accept the chunks: words of ?[31manother node");
  EXPECT_EQ(told.failures[0].ago_ms, 2000u);
  EXPECT_EQ(told.failures[0].cause, "refused");
  EXPECT_EQ(told.failures[1].peer, "tcp://a:5");
  EXPECT_THAT(told.failures[1].what, HasSubstr("the transfer did not end in time"));
  EXPECT_EQ(told.failures[1].cause, "too_slow");
}

TEST_F(NodeActivityTest, HitsAreOfTheLastMinutes) {
  LifeEvent& first = recorder_.add(1, LifeKind::kAdmitted, now_);
  first.tokens = 1000;
  first.local = 100;
  first.loaded = 450;
  EXPECT_EQ(report().tokens, 1000);
  EXPECT_EQ(report().local_tokens, 100);
  EXPECT_EQ(report().loaded_tokens, 450);
  now_ += 1200 * kSecond;
  EXPECT_LT(report().tokens, 1);
}

TEST_F(NodeActivityTest, FrequentPrefixesStayAmongManyOthers) {
  for (int i = 0; i < 500; ++i) {
    if (i % 10 == 0) arrive("aaaaaaaa");
    if (i % 20 == 0) arrive("bbbbbbbb");
    arrive("cccccccc", 256);
    arrive("");
    arrive(fmt::format("{:08x}", i));
    if (i % 10 == 0) report();
  }
  const controller::NodeReport told = report();
  ASSERT_THAT(told.prefixes, SizeIs(controller::kReportPrefixesMax));
  EXPECT_EQ(told.prefixes[0].chunk, "aaaaaaaa");
  EXPECT_NEAR(told.prefixes[0].per_minute, 25, 0.1);
  EXPECT_EQ(told.prefixes[1].chunk, "bbbbbbbb");
  EXPECT_NE(told.prefixes[2].chunk, "cccccccc") << "it counts where it was handed over";
  EXPECT_TRUE(controller::parse_report(encode(told)));
}

}  // namespace
}  // namespace kvferry
