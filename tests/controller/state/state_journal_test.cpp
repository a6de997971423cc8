#include "controller/state/state_journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>

#include "controller/state/batches.h"
#include "controller/state/records.h"
#include "tests/controller/fixtures.h"
#include "tests/manual_clock.h"

namespace kvferry::controller {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kTurnsMax = 2000;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write(const fs::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// A controller without sockets. When this object ends, only the files of the controller remain.
class Life {
 public:
  explicit Life(StateOptions options) : journal_(StateJournal::open(std::move(options), directory, clock).value()) {}

  NodeId join(const std::string& name, std::uint64_t incarnation = 1, std::uint64_t next_sequence = 0) {
    return directory.join(node_info(name, incarnation), next_sequence, clock.now()).value().id;
  }
  NodeId join_empty(const std::string& name) {
    const NodeId node = join(name);
    directory.publish(node, 0, SnapshotMark::kReplaces, {}, clock.now());
    return node;
  }
  void publish(NodeId node, std::uint32_t from, std::uint32_t to) {
    directory.publish(node, directory.repair(node).resend_from, SnapshotMark::kNone, full_chunks(from, to),
                      clock.now());
  }
  /// Returns how many of the keys [0, end), counted from the first one, have a holder.
  std::uint32_t num_found(std::uint32_t end) {
    const NodeId probe = join("probe");
    const auto holders = directory.lookup(probe, {keys_of(0, end), {}, {}}, clock.now()).value();
    directory.leave(probe);
    return holders.empty() ? 0 : holders[0].num_full_chunks;
  }
  void turn() {
    journal_->serve(clock.now());
    journal_->drain();
  }
  bool turn_until(const std::function<bool()>& reached) {
    for (int i = 0; i < kTurnsMax && !reached(); ++i) {
      clock.advance(100 * kMillisecond);
      turn();
    }
    return reached();
  }
  void make_snapshot() {
    journal_->want_snapshot();
    const std::uint64_t before = status().snapshots_written;
    ASSERT_TRUE(turn_until([&] { return status().snapshots_written > before; }));
  }
  StateStatus status() const { return journal_->status(clock.now()); }

  ManualClock clock;
  Directory directory{{.index = {.seed = 1}}};

 private:
  std::unique_ptr<StateJournal> journal_;
};

class StateJournalTest : public ::testing::Test {
 protected:
  StateJournalTest() : root_(fs::temp_directory_path() / fmt::format("kvferry-journal-{}", ::getpid())) {
    fs::remove_all(root_);
    fs::create_directory(root_);
  }
  ~StateJournalTest() override { fs::remove_all(root_); }

  StateOptions options() const { return {.folder = folder()}; }
  std::string folder() const { return root_ / "state"; }
  fs::path log(int number) const { return fs::path(folder()) / fmt::format("log-{:08}", number); }
  fs::path snapshot(int number) const { return fs::path(folder()) / fmt::format("snapshot-{:08}", number); }
  Error refusal() const {
    ManualClock clock;
    Directory directory;
    const auto journal = StateJournal::open(options(), directory, clock);
    return journal ? Error{ErrorCode::kOk, "it was taken"} : journal.error();
  }
  /// Writes eleven batches: a head, a node, and the keys [0, 9) one by one.
  void write_a_log() {
    Life life(options());
    const NodeId node = life.join_empty("a");
    life.turn();
    for (std::uint32_t i = 0; i < 9; ++i) {
      life.publish(node, i, i + 1);
      life.turn();
    }
  }

  fs::path root_;
};

TEST(StateRecords, WhatANodeToldOfItselfComesBackFromRecordsAndImages) {
  NodeInfo info = node_info("a", 3);
  info.serves = "http://a:8000";
  info.version = "1.2.3";
  info.secret = "of the process";
  info.details.host = "pod-a";
  std::string records;
  append_joined(records, NodeId{1}, info, 0);
  for (int i = 0; i < 2; ++i) {  // the second turn loads an image that the first turn has made
    Directory directory;
    DirectoryState state(directory);
    ASSERT_TRUE(Replayer(state).replay(records));
    state.finish(0);
    const auto nodes = directory.status(0);
    ASSERT_EQ(nodes.size(), 1U);
    EXPECT_EQ(nodes[0].serves, "http://a:8000");
    EXPECT_EQ(nodes[0].version, "1.2.3");
    EXPECT_EQ(nodes[0].details.host, "pod-a");
    EXPECT_FALSE(directory.join(node_info("a", 3), 0, 0)) << "another process";
    EXPECT_TRUE(directory.join(info, 0, 0));
    records.clear();
    append_image(records, state.image());
  }
}

/// The records of the last release without NodeDetails.
struct OldJoined : JoinedRecord {
  KVFERRY_FIELDS(id, info.name_space, info.engine_id, info.incarnation, info.role, info.endpoint, info.fingerprint,
                 next_sequence, info.serves, info.version, info.secret);
};
struct OldImage : NodeImage {
  KVFERRY_FIELDS(id, info.name_space, info.engine_id, info.incarnation, info.role, info.endpoint, info.fingerprint,
                 next_sequence, seen, next, owes_snapshot, seen_is_partial, next_is_partial, info.serves, info.version,
                 info.secret);
};

template <class From, class To>
NodeInfo converted(const NodeInfo& info) {
  From from;
  from.info = info;
  return decode<To>(encode(from), "record").value().info;
}

TEST(StateRecords, AreReadByTheReleasesBeforeAndAfterDetails) {
  NodeInfo info = node_info("a", 3);
  info.secret = "of the process";
  info.details.host = "pod-a";
  for (const NodeInfo& read : {converted<OldJoined, JoinedRecord>(info), converted<JoinedRecord, OldJoined>(info),
                               converted<OldImage, NodeImage>(info), converted<NodeImage, OldImage>(info)}) {
    EXPECT_EQ(read.secret, info.secret);
    EXPECT_EQ(read.details.host, "");
  }
}

TEST_F(StateJournalTest, ARestartKnowsEverythingAndConfirmsNothing) {
  std::uint64_t version = 0;
  TierDigests digests;
  for (const ChunkKey& key : keys_of(0, 10)) digests[static_cast<std::size_t>(Tier::kHost)].add(key);
  {
    Life life(options());
    const NodeId a = life.join_empty("a");
    life.publish(a, 0, 10);
    life.join_empty("gone");
    life.directory.leave(life.join("gone"));
    version = life.directory.index_version();
  }
  Life life(options());
  EXPECT_EQ(life.directory.num_nodes(), 1U);
  EXPECT_GT(life.directory.index_version(), version);
  EXPECT_EQ(life.status().records_loaded, 8U);  // a head and seven records
  const NodeId probe = life.join("probe");
  const auto ask = [&] {
    return life.directory.lookup(probe, {keys_of(0, 10), {}, {}}, life.clock.now()).value().at(0);
  };
  EXPECT_EQ(ask().num_full_chunks, 10U);
  EXPECT_FALSE(ask().confirmed);

  const auto older = life.directory.join(node_info("a", 0), 0, life.clock.now());
  ASSERT_FALSE(older);
  EXPECT_THAT(older.error().what, HasSubstr("newer incarnation"));
  const Joined same = life.directory.join(node_info("a"), 2, life.clock.now()).value();
  EXPECT_FALSE(same.snapshot_wanted || same.resend_wanted);
  EXPECT_FALSE(ask().confirmed);
  EXPECT_EQ(life.directory.heartbeat(same.id, 2, life.clock.now(), digests), Update::kApplied);
  EXPECT_TRUE(ask().confirmed);
}

TEST_F(StateJournalTest, ANodeThatHoldsSomethingElseAfterARestartOwesASnapshot) {
  {
    Life life(options());
    life.publish(life.join_empty("a"), 0, 10);
  }
  Life life(options());
  const Joined same = life.directory.join(node_info("a"), 2, life.clock.now()).value();
  life.clock.advance(200 * kMillisecond);
  EXPECT_EQ(life.directory.heartbeat(same.id, 2, life.clock.now(), TierDigests{}), Update::kRepairWanted);
}

TEST_F(StateJournalTest, WhoPublishedOnMeanwhileIsAskedForTheRestAlone) {
  {
    Life life(options());
    life.publish(life.join_empty("a"), 0, 10);
  }
  Life life(options());
  const Joined same = life.directory.join(node_info("a"), 5, life.clock.now()).value();
  EXPECT_TRUE(same.resend_wanted);
  EXPECT_EQ(life.directory.repair(same.id).resend_from, 2U);
}

TEST_F(StateJournalTest, NodesThatDoNotComeBackAreGoneALeaseAfterTheLoad) {
  {
    Life life(options());
    life.publish(life.join_empty("a"), 0, 10);
    life.clock.advance(2400 * kMillisecond);
  }
  Life life(options());
  for (int ms = 0; ms <= 2500; ms += 100, life.clock.advance(100 * kMillisecond))
    ASSERT_TRUE(life.directory.expire(life.clock.now()).empty());
  EXPECT_EQ(life.directory.expire(life.clock.now()).size(), 1U);
  EXPECT_EQ(life.directory.num_chunks(), 0U);
}

TEST_F(StateJournalTest, KeptIsWhatIsOnDiskAndNothingEarlier) {
  std::atomic<bool> is_full{false};
  StateOptions state = options();
  state.write = [&](int fd, const void* data, std::size_t size_bytes) -> ssize_t {
    if (!is_full) return ::write(fd, data, size_bytes);
    errno = ENOSPC;
    return -1;
  };
  Life life(std::move(state));
  const NodeId node = life.join_empty("a");
  EXPECT_EQ(life.directory.kept_below(node), 0U);
  life.turn();
  EXPECT_EQ(life.directory.kept_below(node), 1U);
  is_full = true;
  life.publish(node, 0, 5);
  EXPECT_EQ(life.directory.kept_below(node), 1U);
  life.turn();
  life.turn();
  EXPECT_EQ(life.directory.kept_below(node), 1U);
  EXPECT_FALSE(life.status().durable);
  EXPECT_THAT(life.status().why_not, AllOf(HasSubstr("log-00000001"), HasSubstr("No space left")));
  life.publish(node, 5, 9);
  EXPECT_EQ(life.num_found(9), 9U) << "it goes on in memory";
  for (int i = 0; i < 50; ++i) {
    life.clock.advance(100 * kMillisecond);
    life.turn();
  }
  EXPECT_EQ(life.directory.kept_below(node), 1U);
  is_full = false;
  EXPECT_TRUE(life.turn_until([&] { return life.status().durable; }));
  life.directory.kept_below(node);
  life.turn();
  EXPECT_EQ(life.directory.kept_below(node), 3U);
}

TEST_F(StateJournalTest, AFullDiskCostsNothingThatCameBeforeNorAfterIt) {
  std::atomic<std::int64_t> room{2000};
  StateOptions state = options();
  state.write = [&](int fd, const void* data, std::size_t size_bytes) -> ssize_t {
    const auto some = std::min<std::int64_t>(room, static_cast<std::int64_t>(size_bytes));
    if (some <= 0) {
      errno = ENOSPC;
      return -1;
    }
    room -= some;
    return ::write(fd, data, static_cast<std::size_t>(some));
  };
  {
    Life life(state);
    const NodeId node = life.join_empty("a");
    for (std::uint32_t i = 0; i < 100; ++i) {
      life.publish(node, i, i + 1);
      life.turn();
    }
    ASSERT_FALSE(life.status().durable);
  }
  room = 1'000'000;
  {
    Life life(state);
    const std::uint32_t num_found = life.num_found(100);
    EXPECT_GT(num_found, 10U);
    EXPECT_LT(num_found, 60U);
    EXPECT_TRUE(life.status().durable);
    const NodeId node = life.join("a", 2);
    life.directory.publish(node, 0, SnapshotMark::kReplaces, full_chunks(0, 50), life.clock.now());
    life.turn();
    room = 0;
    life.publish(node, 50, 60);
    life.turn();
    life.turn();
    ASSERT_FALSE(life.status().durable);
    room = 1'000'000;
    ASSERT_TRUE(life.turn_until([&] { return life.status().durable; }));
    life.publish(node, 60, 70);
  }
  Life life(state);
  EXPECT_EQ(life.num_found(100), 70U);
}

TEST_F(StateJournalTest, ASnapshotTakesThePlaceOfOlderFiles) {
  {
    Life life(options());
    const NodeId node = life.join_empty("a");
    life.publish(node, 0, 10);
    life.make_snapshot();
    EXPECT_FALSE(fs::exists(log(1)));
    EXPECT_TRUE(fs::exists(snapshot(2)));
    life.publish(node, 10, 20);
    life.make_snapshot();
    EXPECT_FALSE(fs::exists(snapshot(2)));
    life.publish(node, 20, 30);
  }
  Life life(options());
  EXPECT_EQ(life.num_found(40), 30U);
}

TEST_F(StateJournalTest, ATornEndIsDroppedAtWhateverByte) {
  write_a_log();
  const std::string whole = read(log(1));
  std::size_t last = 0;  // offset of the last batch
  scan_batches(whole, [&, at = std::size_t{0}](std::string_view body) mutable {
    last = at;
    at += kBatchHeadBytes + body.size();
    return true;
  });
  for (std::size_t end = last; end < whole.size(); ++end) {
    fs::remove(log(2));
    write(log(1), whole.substr(0, end));
    Life life(options());
    ASSERT_TRUE(life.status().durable) << end;
    ASSERT_EQ(life.num_found(20), 8U) << end;
    ASSERT_EQ(fs::file_size(log(1)), last);
  }
}

TEST_F(StateJournalTest, AFlippedBitIsSeenWhereverItIs) {
  write_a_log();
  const std::string whole = read(log(1));
  std::size_t last = whole.size();
  scan_batches(whole, [&, at = std::size_t{0}](std::string_view body) mutable {
    last = at;
    at += kBatchHeadBytes + body.size();
    return true;
  });
  for (std::size_t at = 0; at < whole.size(); at += 3) {
    fs::remove_all(folder());
    {
      const Life life(options());  // writes the marker file
    }
    std::string bad = whole;
    bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
    write(log(1), bad);
    Life life(options());
    ASSERT_LT(life.num_found(20), 9U) << at;
    // damage in the last batch looks like an incomplete write, which is not reported
    ASSERT_EQ(life.status().durable, at >= last) << at;
    if (at >= last || at % 16 != 0) continue;
    ASSERT_THAT(life.status().why_not, HasSubstr("log-00000001: the file is damaged at byte")) << at;
    ASSERT_TRUE(life.turn_until([&] { return life.status().durable; }));
    ASSERT_EQ(read(log(1).string() + ".damaged"), bad) << "never thrown away";
  }
}

TEST_F(StateJournalTest, ADamagedSnapshotIsUsedAsFarAsItGoes) {
  {
    Life life(options());
    life.publish(life.join_empty("a"), 0, 10'000);  // so many keys that the snapshot has several blocks
    life.make_snapshot();
  }
  const std::string whole = read(snapshot(2));
  for (const std::size_t at : {std::size_t{3}, whole.size() / 2, whole.size() - 1}) {
    fs::remove_all(folder());
    { const Life life(options()); }
    fs::remove(log(1));
    std::string bad = whole;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    write(snapshot(2), bad);
    {
      Life life(options());
      ASSERT_FALSE(life.status().durable);
      ASSERT_THAT(life.status().why_not, HasSubstr("snapshot-00000002: the file is damaged"));
      ASSERT_EQ(life.num_found(10'000) > 0, at > 3) << at;
      ASSERT_TRUE(life.turn_until([&] { return life.status().durable; }));
      ASSERT_TRUE(fs::exists(snapshot(2).string() + ".damaged"));
    }
    Life life(options());
    ASSERT_TRUE(life.status().durable);
  }
}

TEST_F(StateJournalTest, AMissingFileIsTold) {
  {
    Life life(options());
    life.publish(life.join_empty("a"), 0, 10);
    life.make_snapshot();
  }
  fs::remove(snapshot(2));
  Life life(options());
  EXPECT_FALSE(life.status().durable);
  EXPECT_THAT(life.status().why_not, HasSubstr("log-00000001: the file is missing"));
}

TEST_F(StateJournalTest, OtherUsersReadNothing) {
  fs::create_directories(options().folder);
  fs::permissions(options().folder, fs::perms(0755));
  Life life(options());
  life.publish(life.join_empty("a"), 0, 3);
  life.make_snapshot();
  EXPECT_EQ(fs::status(options().folder).permissions(), fs::perms(0700));
  std::size_t num_files = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(options().folder)) {
    EXPECT_EQ(entry.status().permissions(), fs::perms(0600)) << entry.path();
    ++num_files;
  }
  EXPECT_GE(num_files, 3U);
}

TEST_F(StateJournalTest, AFolderIsOneControllers) {
  const Life life(options());
  EXPECT_EQ(refusal().code, ErrorCode::kRefused);
  EXPECT_THAT(refusal().what, AllOf(HasSubstr("another controller"), HasSubstr(folder()), HasSubstr("--state")));
}

TEST_F(StateJournalTest, WhatIsNotAControllersStateIsLeftAlone) {
  fs::create_directory(folder());
  write(fs::path(folder()) / "thesis.txt", "precious");
  EXPECT_EQ(refusal().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refusal().what, AllOf(HasSubstr("not a kvferry controller's"), HasSubstr("--state none")));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder()), {}), 1);
  fs::remove_all(folder());
  write(folder(), "a file");
  EXPECT_EQ(refusal().code, ErrorCode::kUnavailable);
  EXPECT_THAT(refusal().what, HasSubstr("cannot be created"));
}

TEST_F(StateJournalTest, AnotherFormatIsRefusedAndLeftAlone) {
  write_a_log();
  write(fs::path(folder()) / "kvferry-controller-state", "kvferry controller state, format 2\n");
  EXPECT_EQ(refusal().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refusal().what, HasSubstr("format 2"));
}

}  // namespace
}  // namespace kvferry::controller
