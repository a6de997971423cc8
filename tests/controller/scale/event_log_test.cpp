// Tests that the event log tells a replica that starts later everything that the writers' directories knew.
#include "controller/scale/event_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller::scale {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// A directory and a log into which everything that its nodes send is written, as by sessions and listeners.
struct Source {
  explicit Source(const std::string& name, std::vector<std::string>& log_to, LogWriterOptions options = {})
      : writer(with(options, name), [this, &log_to](std::string entry) {
          if (is_full) return false;
          log_to.push_back(std::move(entry));
          return true;
        }) {}
  static LogWriterOptions with(LogWriterOptions options, const std::string& name) {
    options.writer = name;
    return options;
  }
  void hello(const std::string& name, std::uint64_t incarnation = 1) {
    NodeInfo info = node_info(name, incarnation);
    info.serves = "http://" + name;
    info.version = "1.2.3";
    const Joined joined = directory.join(info, sequences[name], now).value();
    if (joined.fenced) writer.gone(*joined.fenced, now);
    ids[name] = joined.id;
    incarnations[name] = incarnation;
    writer.joined(joined.id, info, sequences[name], now);
  }
  void publish(const std::string& name, std::vector<ChunkKey> keys, bool begins = false, bool ends = false) {
    say(name, wire::Publish{.incarnation = incarnations[name],
                            .sequence = sequences[name]++,
                            .begins_snapshot = begins,
                            .full = {std::move(keys)},
                            .has_end = begins,
                            .ends_snapshot = ends});
  }
  void evict(const std::string& name, std::vector<ChunkKey> keys) {
    say(name, wire::Evict{.incarnation = incarnations[name], .sequence = sequences[name]++, .keys = {std::move(keys)}});
  }
  void leave(const std::string& name) {
    directory.leave(ids[name]);
    writer.gone(ids[name], now);
    ids.erase(name);
    sequences[name] = 0;
  }
  void say(const std::string& name, const wire::Publish& publish) {
    directory.publish(ids[name], publish.sequence, mark_of(publish), chunks_of(publish).value(), now);
    writer.updated(ids[name], publish.sequence, directory.repair(ids[name]).resend_from, encode(publish), now);
  }
  void say(const std::string& name, const wire::Evict& evict) {
    directory.evict(ids[name], evict.sequence, evict.keys.keys, now);
    writer.updated(ids[name], evict.sequence, directory.repair(ids[name]).resend_from, encode(evict), now);
  }
  void flush() { writer.flush(now, !is_full); }

  Directory directory{DirectoryOptions{.lease_ms = 600'000}};
  LogWriter writer;
  bool is_full = false;
  TimeNs now = kSecond;
  std::map<std::string, NodeId> ids;
  std::map<std::string, std::uint64_t> incarnations;
  std::map<std::string, std::uint64_t> sequences;
};

/// Returns the holders of each key.
std::map<std::uint32_t, std::set<std::string>> holders_of(Directory& directory, std::uint32_t num_keys, TimeNs now) {
  const NodeId asker = directory.join(node_info("asker", 1), 0, now).value().id;
  std::map<std::uint32_t, std::set<std::string>> held;
  for (std::uint32_t key = 0; key < num_keys; ++key) {
    const LookupQuery query{.keys = keys_of(key, key + 1), .tail_groups = {}, .exact_tails = {}};
    const std::vector<Holder> holders = directory.lookup(asker, query, now).value();
    for (const Holder& holder : holders)
      held[key].insert(fmt::format("{}@{}{}", holder.engine_id, holder.incarnation, holder.confirmed ? "!" : ""));
  }
  directory.leave(asker);
  return held;
}

std::map<std::uint32_t, std::set<std::string>> unconfirmed(std::map<std::uint32_t, std::set<std::string>> held) {
  for (auto& [key, names] : held) {
    std::set<std::string> plain;
    for (std::string name : names) {
      if (name.ends_with('!')) name.pop_back();
      plain.insert(name);
    }
    names = plain;
  }
  return held;
}

struct Late {
  void read(const std::vector<std::string>& log, std::size_t from = 0) {
    for (std::size_t i = from; i < log.size(); ++i) reader.apply(log[i], now);
  }
  Directory directory{DirectoryOptions{.lease_ms = 600'000}};
  std::uint64_t newest = 0;
  LogReader reader{directory, [this](const NodeInfo& info) { return info.incarnation.value >= newest; }};
  TimeNs now = kSecond;
};

using Names = std::set<std::string>;

TEST(EventLog, ALateReplicaKnowsWhatWasSaidButIsNotSureOfIt) {
  std::vector<std::string> log;
  Source source("r0 1", log);
  source.writer.set_writing(true);
  source.hello("a");
  source.publish("a", keys_of(0, 3), true);
  source.publish("a", {}, false, true);
  source.publish("a", keys_of(3, 6));
  source.evict("a", keys_of(1, 2));
  source.hello("b", 7);
  source.publish("b", keys_of(0, 1), true);
  source.flush();
  Late late;
  late.read(log);
  EXPECT_EQ(late.reader.num_nodes(), 2U);
  const auto held = holders_of(late.directory, 8, late.now);
  EXPECT_EQ(held.at(0), (Names{"a@1", "b@7"})) << "none is confirmed";
  EXPECT_EQ(held.count(1), 0U);
  EXPECT_EQ(held.at(5), (Names{"a@1"}));
  EXPECT_EQ(unconfirmed(holders_of(source.directory, 8, source.now)), held);
  const auto nodes = late.directory.status(late.now);
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[0].serves, "http://a");
  EXPECT_EQ(nodes[1].version, "1.2.3");
}

TEST(EventLog, ANodeThatSpeaksItselfIsAskedForAllAndTheLogHasNoSayInItAnyMore) {
  std::vector<std::string> log;
  Source source("r0 1", log);
  source.writer.set_writing(true);
  source.hello("a");
  source.publish("a", keys_of(0, 3), true);
  source.publish("a", {}, false, true);
  source.flush();
  Late late;
  late.read(log);
  const Joined joined = late.directory.join(node_info("a"), 0, late.now).value();
  late.reader.remove(joined.id);
  EXPECT_TRUE(joined.snapshot_wanted);
  EXPECT_EQ(holders_of(late.directory, 3, late.now).size(), 3U) << "served meanwhile";
  late.directory.publish(joined.id, 0, SnapshotMark::kBegins, full_chunks(1, 3), late.now);
  late.directory.publish(joined.id, 1, SnapshotMark::kEnds, {}, late.now);
  const std::size_t end = log.size();
  source.publish("a", keys_of(7, 8));
  source.hello("a");
  source.leave("a");
  source.flush();
  late.read(log, end);
  const auto held = holders_of(late.directory, 8, late.now);
  EXPECT_EQ(held.size(), 2U);
  EXPECT_EQ(held.at(1), (Names{"a@1!"})) << "confirmed by itself";
}

TEST(EventLog, ANewerIncarnationReplacesTheOlderAndAGoneNodeIsGone) {
  std::vector<std::string> log;
  Source source("r0 1", log);
  source.writer.set_writing(true);
  source.hello("a", 5);
  source.publish("a", keys_of(0, 3), true);
  source.sequences["a"] = 0;
  source.hello("a", 6);
  source.publish("a", keys_of(4, 5), true);
  source.hello("b");
  source.publish("b", keys_of(0, 3), true);
  source.leave("b");
  source.flush();
  Late late;
  late.read(log);
  const auto held = holders_of(late.directory, 8, late.now);
  EXPECT_EQ(held.size(), 1U);
  EXPECT_EQ(held.at(4), (Names{"a@6"}));
  Late fenced;
  fenced.newest = 7;
  fenced.read(log);
  EXPECT_THAT(holders_of(fenced.directory, 8, fenced.now), IsEmpty()) << "a newer one is known";
}

TEST(EventLog, AfterAHoleOnlyWhatWasSaidSinceIsBelieved) {
  std::vector<std::string> log;
  Source source("r0 1", log);
  source.writer.set_writing(true);
  source.hello("a");
  source.publish("a", keys_of(0, 3), true);
  source.publish("a", {}, false, true);
  source.flush();
  source.is_full = true;
  source.evict("a", keys_of(0, 3));
  source.flush();
  source.publish("a", keys_of(3, 4));
  source.flush();
  EXPECT_EQ(source.writer.num_holes(), 1U);
  source.is_full = false;
  source.flush();
  source.publish("a", keys_of(5, 6));
  source.flush();
  Late late;
  late.read(log);
  const auto held = holders_of(late.directory, 8, late.now);
  EXPECT_EQ(held.size(), 1U) << "neither what was evicted in the hole nor what was published in it";
  EXPECT_EQ(held.at(5), (Names{"a@1"}));
}

TEST(EventLog, ATrimmedLogGivesWhatIsLeft) {
  std::vector<std::string> log;
  Source source("r0 1", log, {.entry_bytes_max = 1, .checkpoint_bytes = 600});
  source.writer.set_writing(true);
  source.hello("a");
  source.publish("a", {}, true);
  for (std::uint32_t i = 0; i < 20; ++i) {
    source.publish("a", keys_of(i, i + 1));
    source.flush();
  }
  Late late;
  late.read(log, log.size() / 2);
  const auto held = holders_of(late.directory, 20, late.now);
  EXPECT_GE(held.size(), 3U) << "from the next checkpoint on";
  EXPECT_LT(held.size(), 15U);
  EXPECT_EQ(held.count(19), 1U);
}

TEST(EventLog, WhoTakesOverSaysAgainWhatWasSaidOfLate) {
  std::vector<std::string> log;
  Source first("r0 1", log);
  Source second("r1 1", log);
  first.writer.set_writing(true);
  // A node numbers its messages separately for each replica. At the second replica, there were more messages before.
  second.hello("a");
  second.publish("a", keys_of(0, 1), true);
  second.publish("a", keys_of(1, 2));
  second.publish("a", {}, true);
  for (Source* source : {&first, &second}) {
    if (source == &first) source->hello("a");
    source->publish("a", keys_of(0, 3), source == &first);
    source->publish("a", {}, false, true);
    source->now += 60 * kSecond;
    source->flush();
    source->evict("a", keys_of(0, 1));
  }
  first.flush();
  // The first replica dies, so this message never came into the log:
  second.publish("a", keys_of(4, 5));
  second.writer.set_writing(true);
  second.publish("a", keys_of(5, 6));
  second.flush();
  Late late;
  late.read(log);
  EXPECT_EQ(holders_of(late.directory, 8, late.now), unconfirmed(holders_of(second.directory, 8, second.now)));
}

TEST(EventLog, WhatIsRememberedIsBounded) {
  std::vector<std::string> log;
  Source source("r1 1", log, {.remember_bytes_max = 10'000});
  source.hello("a");
  source.publish("a", {}, true);
  for (std::uint32_t i = 0; i < 1000; ++i) {
    source.publish("a", keys_of(i, i + 10));
    source.flush();
    ASSERT_LE(source.writer.remembered_bytes(), 10'000U);
  }
  EXPECT_THAT(log, IsEmpty());
  source.now += 20 * kSecond;
  source.flush();
  EXPECT_EQ(source.writer.remembered_bytes(), 0U);
}

TEST(EventLog, MalformedEntriesAreCountedAndHarmless) {
  Late late;
  late.reader.apply("nonsense", late.now);
  late.reader.apply("", late.now);
  late.reader.apply(encode(LogEntry{.version = 9, .writer = "w", .records = {}}), late.now);
  late.reader.apply(encode(LogEntry{.writer = "w", .records = {{.kind = 1, .engine_id = "a", .bytes = "x"}}}),
                    late.now);
  EXPECT_EQ(late.reader.num_malformed(), 4U);
  EXPECT_EQ(late.reader.num_nodes(), 0U);
  std::mt19937_64 random(7);
  std::vector<std::string> log;
  Source source("r0 1", log);
  source.writer.set_writing(true);
  source.hello("a");
  source.publish("a", keys_of(0, 30), true);
  source.flush();
  for (int i = 0; i < 20'000; ++i) {
    std::string entry = log[0];
    for (std::uint64_t n = random() % 4; n < 4; ++n) entry[random() % entry.size()] = static_cast<char>(random());
    if (random() % 4 == 0) entry.resize(random() % entry.size());
    late.reader.apply(entry, late.now);
  }
  EXPECT_GT(late.reader.num_malformed(), 1000U);
}

TEST(EventLog, APublishWithMalformedChunksIsCountedAndTheNextOnesAreApplied) {
  std::vector<std::string> log;
  Source source("r0 1", log);
  source.writer.set_writing(true);
  source.hello("a");
  source.publish("a", {}, true);
  wire::Publish bad{.incarnation = 1, .sequence = source.sequences["a"]++};
  bad.tails.num_tokens.resize(1);  // a column without the others
  ASSERT_FALSE(chunks_of(bad));
  source.writer.updated(source.ids["a"], bad.sequence, bad.sequence + 1, encode(bad), source.now);
  source.directory.publish(source.ids["a"], bad.sequence, mark_of(bad), {}, source.now);
  source.publish("a", keys_of(0, 2));
  source.flush();
  Late late;
  late.read(log);
  EXPECT_EQ(late.reader.num_malformed(), 1U);
  EXPECT_EQ(holders_of(late.directory, 2, late.now).at(1), (Names{"a@1"}));
}

/// Two replicas get the same messages and take turns in writing. A reader of the whole log must know what they know.
TEST(EventLog, ReadersAgreeWithWritersOnRandomSchedules) {
  constexpr std::uint32_t kKeys = 24;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    const auto dice = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
    std::vector<std::string> log;
    const LogWriterOptions options{.entry_bytes_max = 300, .checkpoint_bytes = 2000};
    Source sources[] = {Source("r0 1", log, options), Source("r1 1", log, options)};
    sources[0].writer.set_writing(true);
    std::map<std::string, std::uint64_t> incarnations;
    for (int step = 0; step < 200; ++step) {
      const std::string name = "n" + std::to_string(dice(4));
      const std::uint32_t from = dice(kKeys), to = from + dice(4);
      const bool is_here = sources[0].ids.contains(name);
      const std::uint32_t what = dice(20);
      const bool is_anew = !is_here || what == 0;
      if (is_anew) ++incarnations[name];
      const std::uint32_t pause_ms = dice(2000);
      for (Source& source : sources) {
        source.now += pause_ms * kMillisecond;
        if (is_anew) {
          source.sequences[name] = &source == &sources[0] ? 0 : 100;
          source.hello(name, incarnations[name]);
          source.publish(name, {}, true);
          source.publish(name, {}, false, true);
        } else if (what == 1) {
          source.leave(name);
        } else if (what == 2) {
          source.publish(name, keys_of(from, to), true);
          source.publish(name, {}, false, true);
        } else if (what < 9) {
          source.evict(name, keys_of(from, to));
        } else {
          source.publish(name, keys_of(from, to));
        }
        source.flush();
      }
      if (what == 19) {
        const bool is_first = sources[0].writer.is_writing();
        // The replica that wrote the log dies, and the other one takes over from what it remembers.
        sources[0].writer.set_writing(!is_first);
        sources[1].writer.set_writing(is_first);
      }
    }
    for (Source& source : sources) source.flush();
    Late late;
    late.read(log);
    ASSERT_EQ(holders_of(late.directory, kKeys + 4, late.now),
              unconfirmed(holders_of(sources[0].directory, kKeys + 4, sources[0].now)))
        << seed;
  }
}

}  // namespace
}  // namespace kvferry::controller::scale
