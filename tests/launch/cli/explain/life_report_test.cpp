// Tests what `kvferry explain` makes of the nodes' answers.
#include "launch/cli/explain/life_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <numeric>

#include "launch/cli/explain/life_list.h"
#include "launch/cli/explain/traced_requests.h"

namespace kvferry::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Not;

LifeEvent event(LifeKind kind, TimeNs age_ms, Cause cause = Cause::kNone) {
  LifeEvent made;
  made.kind = static_cast<std::uint8_t>(kind);
  made.cause = static_cast<std::uint8_t>(cause);
  made.at = age_ms * kMillisecond;
  return made;
}

NodeAnswer answer(const std::string& name, std::vector<LifeEvent> events) {
  NodeAnswer made{name, "kv_both", "tcp://" + name + ":1", true, 100 * kSecond};
  made.lives.push_back({"cmpl-r-0-" + name, false, std::move(events)});
  return made;
}

/// A prefill of 100 ms; a decode that is preempted once, and whose tail was evicted.
std::vector<NodeAnswer> handed_over() {
  LifeEvent arrived = event(LifeKind::kArrived, 890), admitted = event(LifeKind::kAdmitted, 850),
            resumed = event(LifeKind::kAdmitted, 500, Cause::kEvicted);
  arrived.tokens = 400;
  arrived.expected = admitted.expected = 400;
  arrived.peer = "tcp://p:1";
  admitted.tokens = 400;
  admitted.loaded = 399;
  resumed.tokens = resumed.expected = 420;
  resumed.loaded = 256;
  return {answer("d", {arrived, event(LifeKind::kWaits, 890), event(LifeKind::kAnswered, 850), admitted,
                       event(LifeKind::kComputed, 830), event(LifeKind::kPreempted, 600), resumed,
                       event(LifeKind::kComputed, 480), event(LifeKind::kFinished, 100)}),
          answer("p", {event(LifeKind::kArrived, 1000), event(LifeKind::kAdmitted, 995, Cause::kNoHolder),
                       event(LifeKind::kFinished, 900)})};
}

TEST(LifeReport, ItsPartsAddUpToTheWholeTime) {
  const LifeReport report = make_report(handed_over());
  EXPECT_EQ(report.duration, 900 * kMillisecond);
  TimeNs sum = 0;
  std::vector<std::string> parts;
  for (const LifePart& part : report.parts) {
    sum += part.duration;
    parts.push_back(fmt::format("{} {} {}", part.node, part.what, part.duration / kMillisecond));
  }
  EXPECT_EQ(sum, report.duration);
  EXPECT_THAT(parts, ElementsAre("p waiting in the engine's queue 5", "p computing 95",
                                 " on the way to the next node (router, network) 10",
                                 "d waiting for KV of other nodes 40", "d loading within a step, and computing 20",
                                 "d decoding 230", "d preempted, waiting in the engine's queue 100",
                                 "d loading within a step, and computing 20", "d decoding 380"));
}

TEST(LifeReport, ALifeBeginsWhenTheServerGotTheRequest) {
  std::vector<NodeAnswer> answers = handed_over();
  answers[0].lives[0].events[0].duration = 4 * kMillisecond;
  answers[1].lives[0].events[0].duration = 30 * kMillisecond;
  const LifeReport report = make_report(answers);
  EXPECT_EQ(report.duration, 930 * kMillisecond);
  EXPECT_EQ(report.lives[0].lines[0].at, 30 * kMillisecond);
  ASSERT_EQ(report.parts.size(), 11u);
  EXPECT_EQ(report.parts[0].what, "waiting in the server, until its scheduler's first lookup");
  EXPECT_EQ(report.parts[0].duration, 30 * kMillisecond);
  EXPECT_EQ(report.parts[3].duration, 6 * kMillisecond) << "between the nodes";
  EXPECT_EQ(report.parts[4].duration, 4 * kMillisecond);
}

TEST(LifeReport, AnAbsurdWaitDoesNotCount) {
  LifeEvent arrived = event(LifeKind::kArrived, 100);
  for (const TimeNs wait : {std::numeric_limits<TimeNs>::max(), std::numeric_limits<TimeNs>::min(), 3601 * kSecond}) {
    arrived.duration = wait;
    EXPECT_EQ(make_report({answer("d", {arrived, event(LifeKind::kFinished, 0)})}).duration, 100 * kMillisecond);
  }
}

TEST(LifeReport, TellsWhatWasComputedAgainAndWhy) {
  const LifeReport report = make_report(handed_over());
  ASSERT_EQ(report.recomputed.size(), 1u);
  EXPECT_EQ(report.recomputed[0].num_tokens, 163u);  // the 420th is computed in any case
  EXPECT_EQ(report.recomputed[0].node, "d");
  const std::string text = report_text(report, "r");
  EXPECT_THAT(text, HasSubstr("computed again\n  163 tokens on d: this node's pool had evicted the chunks\n"));
  EXPECT_THAT(text, HasSubstr("arrived with 400 tokens, 0 in the pool, 400 handed over by p"));
}

TEST(LifeReport, AnAsynchronousLoadIsAPartOfItsOwn) {
  const LifeReport report = make_report(
      {answer("d", {event(LifeKind::kArrived, 100), event(LifeKind::kAdmitted, 90), event(LifeKind::kLoadBegan, 90),
                    event(LifeKind::kLoaded, 40), event(LifeKind::kComputed, 30), event(LifeKind::kFinished, 0)})});
  ASSERT_EQ(report.parts.size(), 4u);
  EXPECT_EQ(report.parts[1].what, "loading KV into blocks");
  EXPECT_EQ(report.parts[1].duration, 50 * kMillisecond);
}

TEST(LifeReport, ARunningRequestEndsNow) {
  const LifeReport report = make_report({answer("d", {event(LifeKind::kArrived, 100)})});
  EXPECT_EQ(report.duration, 100 * kMillisecond);
  EXPECT_TRUE(report.lives.at(0).is_running);
  EXPECT_EQ(report.parts.at(0).what, "waiting in the engine's queue (still)");
}

TEST(LifeReport, ALifeWithoutEventsDoesNotMoveTheOthers) {
  std::vector<NodeAnswer> answers = handed_over();
  answers.push_back(answer("full", {}));
  answers.back().lives[0].is_cut = true;
  const LifeReport report = make_report(answers);
  EXPECT_EQ(report.duration, kSecond);
  EXPECT_THAT(report_text(report, "r"), HasSubstr("earlier events were overwritten"));
}

TEST(LifeReport, OverlappingLivesAreToldOneByOne) {
  std::vector<LifeEvent> events = {event(LifeKind::kArrived, 100), event(LifeKind::kFinished, 50)};
  const LifeReport report = make_report({answer("a", events), answer("b", events)});
  EXPECT_TRUE(report.parts.empty());
  EXPECT_THAT(report_text(report, "r"), HasSubstr("a: waiting in the engine's queue\n        50.0 ms  b: waiting"));
}

TEST(LifeReport, NamesTheNodesWhoseEventsAreMissing) {
  std::vector<NodeAnswer> answers = {handed_over()[0], {"frozen", "kv_producer", "tcp://f:1"}};
  EXPECT_THAT(make_report(answers).missing,
              ElementsAre("node frozen at tcp://f:1 did not answer, so its events are missing",
                          "the node at tcp://p:1 is not registered any more, so its events are missing"));
}

TEST(LifeReport, ATransferHasItsShareOfThePathsLimit) {
  LifeEvent pulled = event(LifeKind::kPulled, 50), pushed = event(LifeKind::kPushed, 40);
  pulled.chunks = pushed.chunks = 3;
  pulled.bytes = pushed.bytes = 12 << 20;
  pulled.duration = pushed.duration = 31 * kMillisecond / 10;
  pulled.path = pushed.path = "ucx";
  pulled.peer = "tcp://p:1";
  pulled.limit_mb_per_s = 6500;
  const LifeReport report =
      make_report({answer("d", {event(LifeKind::kArrived, 100), pulled, pushed}), answer("p", {})});
  const auto& lines = report.lives.at(0).lines;
  EXPECT_EQ(lines.at(1).text,
            "pulled 3 chunks from p over ucx: 12.00 MiB in 3.1 ms, 4.06 GB/s, 62 % of this path's limit (6.50)");
  EXPECT_THAT(lines.at(2).text, HasSubstr("12.00 MiB in 3.1 ms since the offer, 4.06 GB/s"));
  EXPECT_THAT(lines.at(2).text, Not(HasSubstr("limit"))) << "the path was not measured yet";
  const nlohmann::json told = report_json(report, "r")["lives"][0]["events"][1];
  EXPECT_DOUBLE_EQ(told["limit_gb_per_s"].get<double>(), 6.5);
  EXPECT_NEAR(told["share_of_limit"].get<double>(), 0.624, 0.001);
}

TEST(LifeReport, APushWhoseChunksTheDecodeNodePullsIsNoTransferOfItsOwn) {
  LifeEvent pushed = event(LifeKind::kPushed, 40);
  pushed.chunks = 3;
  pushed.duration = 31 * kMillisecond / 10;
  pushed.peer = "tcp://p:1";
  pushed.note = "announced";
  const LifeReport report = make_report({answer("d", {event(LifeKind::kArrived, 100), pushed}), answer("p", {})});
  EXPECT_EQ(report.lives.at(0).lines.at(1).text, "announced 3 chunks to p, which pulls them: 3.1 ms since the offer");
}

TEST(LifeReport, SaysHowWellTheTimesOfNodesFitAndWhoseClockDiffers) {
  std::vector<NodeAnswer> answers = handed_over();
  answers[0].error = 2 * kMillisecond;
  answers[1].clock_ahead = -3 * kSecond;
  const LifeReport report = make_report(answers);
  EXPECT_THAT(report.clocks, ElementsAre(HasSubstr("the clock of p's host is 3.0 s behind this host's"),
                                         HasSubstr("times of different nodes are accurate to 4.0 ms")));
  EXPECT_EQ(report.duration, 900 * kMillisecond) << "the order follows the ages of events, and no clock";
  EXPECT_TRUE(make_report({answers[0]}).clocks.empty());
}

TEST(LifeReport, LivesOverlapByNoMoreThanTheirTimesMayBeWrong) {
  std::vector<NodeAnswer> answers = handed_over();
  answers[0].at -= 17 * kMillisecond;  // the decode node's events seem to begin 7 ms before the prefill's end
  EXPECT_TRUE(make_report(answers).parts.empty());
  answers[0].error = 3 * kMillisecond;
  EXPECT_FALSE(make_report(answers).parts.empty());
}

TEST(TracedRequests, AreSplitByHandOffsAndIds) {
  std::vector<NodeAnswer> answers = handed_over();
  answers[0].lives[0].events[0].note = "prefill-of-r-0-1e8b90aa";
  answers[1].lives[0].request = "prefill-of-r-0-1e8b90aa";
  RequestLife later{"cmpl-s-0-77d0e1f1", false, {event(LifeKind::kArrived, 50)}};
  answers[0].lives.push_back(later);
  later.request = "cmpl-s-0-0123abcd";  // a second try on the other node
  answers[1].lives.insert(answers[1].lives.begin(), later);
  const std::vector<std::vector<NodeAnswer>> requests = split_by_request(answers);
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(make_report(requests[0]).duration, 900 * kMillisecond) << "the older request comes first";
  ASSERT_EQ(make_report(requests[1]).lives.size(), 2u);
  EXPECT_EQ(make_report(requests[1]).lives[0].request, "cmpl-s-0-77d0e1f1");
  EXPECT_TRUE(split_by_request({}).empty());
}

TEST(LifeList, HasTheSlowestOrTheNewestFirst) {
  std::vector<NodeAnswer> answers = handed_over();
  answers.push_back(answer("other", {event(LifeKind::kArrived, 10)}));
  const LifeReport report = make_report(answers);
  const auto nodes = [&](bool slowest) {
    std::vector<std::string> found;
    for (const ListedLife& life : list_lives(report, 2, slowest)) found.push_back(life.node);
    return found;
  };
  EXPECT_THAT(nodes(true), ElementsAre("d", "p"));
  EXPECT_THAT(nodes(false), ElementsAre("other", "d"));
  const std::string text = list_text(list_lives(report, 3, false));
  EXPECT_THAT(text, HasSubstr("   0.0 s ago      10.0 ms+ other"));
  EXPECT_THAT(text, HasSubstr("   0.9 s ago     790.0 ms  d"));
  EXPECT_THAT(text, HasSubstr("        1         163  cmpl-r-0-d: this node's pool had evicted the chunks\n"));
}

/// The first column of the rows of the table in launch/docs/operations.md under the heading "Causes".
std::vector<std::string> causes_on_the_page() {
  std::ifstream page(KVFERRY_OPERATIONS_PAGE);
  std::vector<std::string> causes;
  bool is_there = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("#")) is_there = line == "### Causes";
    if (is_there && line.starts_with("| ")) causes.push_back(line.substr(2, line.find(" | ") - 2));
  }
  return causes;
}

TEST(OperationsPage, HasARowForEachCause) {
  std::vector<std::string> wanted = {"cause"};
  for (int cause = 1; cause <= static_cast<int>(Cause::kLoadFailed); ++cause)
    wanted.push_back(text_of(static_cast<Cause>(cause)));
  EXPECT_THAT(causes_on_the_page(), ElementsAreArray(wanted));
}

TEST(LifeReport, WhatALyingNodeSaysStaysHarmless) {
  std::vector<LifeEvent> lies;
  for (int kind = 0; kind < 256; ++kind) {
    LifeEvent lie = event(static_cast<LifeKind>(kind), 0, static_cast<Cause>(kind));
    lie.at = kind % 2 == 0 ? std::numeric_limits<TimeNs>::min() : std::numeric_limits<TimeNs>::max();
    lie.duration = std::numeric_limits<TimeNs>::min();
    lie.tokens = lie.local = lie.loaded = lie.expected = std::numeric_limits<std::uint32_t>::max();
    lie.bytes = std::numeric_limits<std::uint64_t>::max();
    lie.limit_mb_per_s = kind % 3 == 0 ? 0 : std::numeric_limits<std::uint32_t>::max();
    lie.peer = "\x1b[2J\xff\n";
    lie.note = "\x1b[2J\xff\n";
    lies.push_back(lie);
  }
  std::vector<NodeAnswer> answers = {answer("\x1b[31mliar", lies)};
  answers[0].lives[0].trace = "\x1b[2J";
  ASSERT_EQ(split_by_request(answers).size(), 1u);
  const LifeReport report = make_report(answers);
  EXPECT_EQ(report_text(report, "r\x1b").find('\x1b'), std::string::npos);
  for (const LifeLine& line : report.lives.at(0).lines)
    EXPECT_EQ(line.text.find_first_of("\x1b\xff\n"), line.text.npos);
  EXPECT_EQ(list_text(list_lives(report, 1, true)).find_first_of("\x1b\xff"), std::string::npos);
  EXPECT_FALSE(report_json(report, "r\xff").dump(2, ' ', false, nlohmann::json::error_handler_t::replace).empty());
}

}  // namespace
}  // namespace kvferry::cli
