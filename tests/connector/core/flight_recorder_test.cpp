// Tests the flight recorder's ring.
#include "connector/core/flight_recorder.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace kvferry {
namespace {

TEST(FlightRecorder, TellsARequestsEventsInTheirOrderWithTheirAge) {
  FlightRecorder recorder(8, 4);
  const std::uint64_t a = recorder.begin("cmpl-a-0-11112222"), b = recorder.begin("b");
  recorder.add(a, LifeKind::kArrived, 10).tokens = 7;
  recorder.add(b, LifeKind::kArrived, 11);
  recorder.add(a, LifeKind::kFinished, 15);
  const std::vector<RequestLife> lives = recorder.find("a", 20);
  ASSERT_EQ(lives.size(), 1u);
  EXPECT_EQ(lives[0].request, "cmpl-a-0-11112222");
  EXPECT_FALSE(lives[0].is_cut);
  ASSERT_EQ(lives[0].events.size(), 2u);
  EXPECT_EQ(lives[0].events[0].tokens, 7u);
  EXPECT_EQ(lives[0].events[0].at, 10);
  EXPECT_EQ(lives[0].events[1].at, 5);
}

TEST(FlightRecorder, FindsIdsByPartsBetweenHyphensOnly) {
  FlightRecorder recorder(8, 4);
  recorder.begin("cmpl-6f1a-42-0-11112222");
  for (const char* found : {"6f1a-42", "cmpl-6f1a-42-0-11112222", "6f1a", "11112222"})
    EXPECT_EQ(recorder.find(found, 0).size(), 1u) << found;
  for (const char* other : {"", "6f1", "f1a-42", "6f1a-42-", "7", "cmpl-6f1a-42-0-111122223"})
    EXPECT_EQ(recorder.find(other, 0).size(), 0u) << other;
}

TEST(FlightRecorder, FindsTheRequestsOfATraceAndRecordsNothingElseAsOne) {
  const std::string trace = "0af7651916cd43dd8448eb211c80319c";
  FlightRecorder recorder(8, 16);
  recorder.begin("a", trace);
  recorder.begin("b");
  recorder.begin("c", trace);
  const std::vector<RequestLife> lives = recorder.find_trace(trace, 0);
  ASSERT_EQ(lives.size(), 2u);
  EXPECT_EQ(lives[0].request, "a");
  EXPECT_EQ(lives[1].request, "c");
  EXPECT_EQ(lives[1].trace, trace);
  EXPECT_EQ(recorder.find("b", 0).at(0).trace, "");
  for (const std::string& none : {std::string(), std::string(32, '0'), trace.substr(1), trace + "0",
                                  "0AF7" + trace.substr(4), "\x1b[2J" + trace.substr(4), std::string(99999, 'a')}) {
    recorder.begin("none", none);
    EXPECT_EQ(recorder.find("none", 0).back().trace, "") << none.substr(0, 40);
    EXPECT_TRUE(recorder.find_trace(none, 0).empty()) << none.substr(0, 40);
  }
}

TEST(FlightRecorder, OverwritesTheOldestAndSaysSo) {
  FlightRecorder recorder(4, 2);
  const std::uint64_t a = recorder.begin("a");
  for (int i = 0; i < 3; ++i) recorder.add(a, LifeKind::kPulled, i);
  const std::uint64_t b = recorder.begin("b");
  for (int i = 0; i < 3; ++i) recorder.add(b, LifeKind::kPulled, i);
  ASSERT_EQ(recorder.find("a", 0).size(), 1u);
  EXPECT_TRUE(recorder.find("a", 0)[0].is_cut);
  EXPECT_EQ(recorder.find("a", 0)[0].events.size(), 1u);
  EXPECT_FALSE(recorder.find("b", 0)[0].is_cut);
  recorder.begin("c");  // takes the place of `a`, whose later events belong to no request
  recorder.add(a, LifeKind::kPushed, 9);
  EXPECT_TRUE(recorder.find("a", 0).empty());
  EXPECT_TRUE(recorder.find("c", 0)[0].events.empty());
}

TEST(FlightRecorder, TellsEachEndedTransferOnce) {
  FlightRecorder recorder(4, 2);
  const std::uint64_t a = recorder.begin("a");
  for (const LifeKind kind : {LifeKind::kAdmitted, LifeKind::kPulled, LifeKind::kLoaded}) recorder.add(a, kind, 10);
  const std::vector<RequestLife> first = recorder.transfers_after(0, 15);
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].request, "a");
  EXPECT_EQ(first[0].events[0].what(), LifeKind::kPulled);
  EXPECT_EQ(first[0].events[0].at, 5);
  EXPECT_EQ(first[1].events[0].what(), LifeKind::kLoaded);
  const std::uint64_t last = recorder.last();
  EXPECT_TRUE(recorder.transfers_after(last, 15).empty());
  for (const char* id : {"b", "c"}) recorder.begin(id);  // they take the place of `a`
  recorder.add(a, LifeKind::kPushed, 16);
  ASSERT_EQ(recorder.transfers_after(last, 20).size(), 1u);
  EXPECT_EQ(recorder.transfers_after(last, 20)[0].request, "");
  for (int i = 0; i < 6; ++i) recorder.add(a, LifeKind::kPushed, 16);
  EXPECT_EQ(recorder.transfers_after(last, 20).size(), 4u) << "the others were overwritten";
}

TEST(FlightRecorder, BoundsWhatItTells) {
  FlightRecorder recorder(1000, 100);
  for (int i = 0; i < 50; ++i) recorder.begin("same-" + std::to_string(i));
  const std::uint64_t last = recorder.begin("same-x");
  for (int i = 0; i < 500; ++i) recorder.add(last, LifeKind::kPulled, i).note = std::string(500, 'n');
  const std::vector<RequestLife> lives = recorder.find("same", 0);
  ASSERT_EQ(lives.size(), FlightRecorder::kLivesMax);
  EXPECT_EQ(lives.back().request, "same-x");
  EXPECT_TRUE(lives.back().is_cut);
  EXPECT_EQ(lives.back().events.size(), FlightRecorder::kEventsMax);
  EXPECT_EQ(lives.back().events[0].note.view(), std::string(103, 'n'));
}

TEST(FlightRecorder, CutsNoTextInsideACharacter) {
  FlightRecorder recorder(8, 4);
  // An id has room for 127 bytes. "é" has two bytes, "€" three, and 💡 four.
  for (const std::string text : {"é", "€", "💡"}) {
    for (std::size_t missing = 1; missing < text.size(); ++missing) {
      const std::string begin(127 - missing, 'a');
      recorder.begin(begin + text + text);
      EXPECT_EQ(recorder.newest(1, 0).at(0).request, begin) << text << " " << missing;
    }
    const std::string begin(127 - text.size(), 'a');
    recorder.begin(begin + text);
    EXPECT_EQ(recorder.newest(1, 0).at(0).request, begin + text);
    recorder.begin(begin + text + "more");
    EXPECT_EQ(recorder.newest(1, 0).at(0).request, begin + text);
  }
}

TEST(FlightRecorder, EveryCauseHasATextAndAnUnknownOneItsNumber) {
  for (int cause = 0; cause <= static_cast<int>(Cause::kLoadFailed); ++cause)
    EXPECT_EQ(text_of(static_cast<Cause>(cause)).find("unknown"), std::string::npos) << cause;
  EXPECT_EQ(text_of(static_cast<Cause>(200)), "unknown cause 200 of a newer release");
}

TEST(FlightRecorder, ListsTheNewestAndTheSlowest) {
  FlightRecorder recorder(64, 4);
  // [request] begin and end; 0: runs still
  const std::vector<std::pair<TimeNs, TimeNs>> kTimes = {{1, 99}, {10, 15}, {20, 50}, {30, 31}, {60, 0}};
  for (const auto& [begin, end] : kTimes) {
    const std::uint64_t number = recorder.begin("r" + std::to_string(begin));
    recorder.add(number, LifeKind::kArrived, begin);
    if (end != 0) recorder.add(number, LifeKind::kFinished, end);
    if (end != 0) recorder.add(number, LifeKind::kPushed, 500);  // after its end, so this is no part of its time
  }
  const auto ids = [](const std::vector<RequestLife>& lives) {
    std::vector<std::string> found;
    for (const RequestLife& life : lives) found.push_back(life.request);
    return found;
  };
  // r1 had the longest time, but r60 has taken its place.
  EXPECT_EQ(ids(recorder.slowest(3, 100)), (std::vector<std::string>{"r60", "r20", "r10"}));
  EXPECT_EQ(ids(recorder.newest(2, 100)), (std::vector<std::string>{"r60", "r30"}));
  EXPECT_EQ(recorder.newest(1000, 100).size(), 4u);
  EXPECT_EQ(recorder.slowest(1000, 100).size(), 4u);
  EXPECT_TRUE(FlightRecorder(8, 4).slowest(3, 0).empty());
}

TEST(FlightRecorder, ARequestsTimeIncludesItsWaitForTheFirstLookup) {
  FlightRecorder recorder(8, 4);
  const std::uint64_t a = recorder.begin("a"), b = recorder.begin("b");
  recorder.add(a, LifeKind::kArrived, 100, {.duration = 90});
  recorder.add(b, LifeKind::kArrived, 50);
  recorder.add(a, LifeKind::kFinished, 110);
  recorder.add(b, LifeKind::kFinished, 110);
  EXPECT_EQ(recorder.slowest(1, 120).at(0).request, "a");
}

}  // namespace
}  // namespace kvferry
