// Compares a controller's state with a simple model, with deaths at any byte. A child process does random operations
// and dies in the middle of a write. The state that is then loaded must be the model's state at some moment between the
// last acknowledged and the last begun operation. The seed of a failing run is in the test's name.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <sstream>

#include "controller/state/state_journal.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {
namespace {

constexpr std::uint32_t kNumEngines = 5;
constexpr std::uint32_t kModelKeys = 40;
constexpr std::uint32_t kNumTails = 10;  // the tails have the numbers 1000, 1001, ...; all are in one group
constexpr std::uint32_t kGroup = 2000;
constexpr int kNumOps = 1500;
constexpr int kNumLives = 8;
constexpr std::size_t kNodesEver = 4096;

std::string space_of(const std::string& name) { return name.back() % 2 == 0 ? "even" : "odd"; }

struct Held {
  std::map<std::uint32_t, std::uint8_t> tiers;  // key: number of the chunk; value: a bit for each tier
  std::vector<std::uint32_t> tails;             // oldest tail first
  TierDigests digests() const {
    TierDigests digests;
    for (const auto& [number, bits] : tiers) {
      for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
        if ((bits >> tier & 1) != 0) digests[tier].add(key_of(number));
      }
    }
    return digests;
  }
};
struct PlainNode {
  NodeId id;
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;
  bool owes_snapshot = true;
  Held seen{};
  std::optional<Held> next{};
};

/// Does the same random operations on a model and, if there is one, on a directory.
class Script {
 public:
  explicit Script(unsigned seed) : random_(seed) {}

  void step(Directory* directory) {
    now_ += kMillisecond;
    const std::string name = fmt::format("engine{}", draw(kNumEngines));
    const auto node = nodes_.find(name);
    const std::uint32_t dice = draw(100);
    if (node == nodes_.end() || dice < 5) return join(directory, name);
    if (dice < 8) {
      if (directory != nullptr) directory->leave(node->second.id);
      nodes_.erase(node);
      return;
    }
    if (dice < 12) return wait(directory);
    if (dice < 40) return evict(directory, node->second);
    SnapshotMark mark = SnapshotMark::kNone;
    if (dice < 46) mark = SnapshotMark::kBegins;
    if (dice >= 46 && dice < 56) mark = SnapshotMark::kEnds;
    if (dice == 56) mark = SnapshotMark::kReplaces;
    publish(directory, node->second, mark);
  }

  TimeNs now() const { return now_; }
  const std::map<std::string, PlainNode>& nodes() const { return nodes_; }

  /// Returns the model's state in words: everything that can be queried from a directory. The last id distinguishes
  /// equal states before and after a node left and returned.
  std::string status() const {
    std::string status = fmt::format("last id {}\n", last_id_);
    for (const auto& [name, node] : nodes_) {
      status += fmt::format("{} {} next {}", name, node.incarnation, node.sequence);
      for (const auto& [number, bits] : node.seen.tiers)
        status += fmt::format(" {}@{}", number, std::countr_zero(bits));
      status += " tails";
      for (auto tail = node.seen.tails.rbegin(); tail != node.seen.tails.rend(); ++tail)
        status += fmt::format(" {}", *tail);
      status += "\n";
    }
    return status;
  }

 private:
  std::uint32_t draw(std::uint32_t end) { return std::uniform_int_distribution<std::uint32_t>(0, end - 1)(random_); }

  void join(Directory* directory, const std::string& name) {
    const auto known = nodes_.find(name);
    const bool again = known != nodes_.end() && draw(2) == 0;
    const std::uint64_t incarnation = known == nodes_.end() ? draw(5) : known->second.incarnation + (again ? 0 : 1);
    const std::uint64_t sequence = again ? known->second.sequence : draw(10);
    if (directory != nullptr) {
      const Result<Joined> joined = directory->join(node_info(name, incarnation, space_of(name)), sequence, now_);
      if (!joined || joined->id.value != (again ? known->second.id.value : last_id_ + 1)) ::_exit(3);
    }
    if (again) return;
    nodes_[name] = PlainNode{.id = NodeId{++last_id_}, .incarnation = incarnation, .sequence = sequence};
  }
  void wait(Directory* directory) {
    now_ += kSecond;  // snapshots end too late, so that they expire
    if (directory != nullptr) directory->expire(now_);
    for (auto& [name, node] : nodes_) node.next.reset();
  }
  void publish(Directory* directory, PlainNode& node, SnapshotMark mark) {
    const auto tier = static_cast<Tier>(draw(4));
    std::vector<ChunkEntry> chunks;
    if (mark == SnapshotMark::kReplaces) {
      node.seen = {};
      node.next.reset();
      node.owes_snapshot = false;
    }
    if (mark == SnapshotMark::kBegins) {
      node.next = Held{};
      node.owes_snapshot = true;
    }
    const auto add = [&](std::uint32_t number, bool is_tail) {
      for (Held* held : {&node.seen, node.next ? &*node.next : nullptr}) {
        if (held == nullptr) continue;
        held->tiers[number] |= static_cast<std::uint8_t>(1U << static_cast<unsigned>(tier));
        if (!is_tail) continue;
        std::erase(held->tails, number);
        held->tails.push_back(number);
      }
    };
    for (std::uint32_t i = draw(4); i > 0; --i) {
      const std::uint32_t tail = 1000 + draw(kNumTails);
      chunks.push_back(tail_chunk(tail, kGroup));
      add(tail, true);
    }
    for (std::uint32_t i = draw(kModelKeys), end = i + draw(kModelKeys - i); i < end; ++i) {
      chunks.push_back({key_of(i), 256, false, {}});
      add(i, false);
    }
    if (directory != nullptr &&
        directory->publish(node.id, node.sequence, mark, chunks, now_, tier) == Update::kUnknownNode)
      ::_exit(4);
    ++node.sequence;
    if (mark == SnapshotMark::kEnds && node.next) {
      node.seen = *node.next;
      node.next.reset();
      node.owes_snapshot = false;
    }
  }
  void evict(Directory* directory, PlainNode& node) {
    std::vector<ChunkKey> keys;
    const auto drop = [&](std::uint32_t number) {
      keys.push_back(key_of(number));
      for (Held* held : {&node.seen, node.next ? &*node.next : nullptr}) {
        if (held == nullptr) continue;
        held->tiers.erase(number);
        std::erase(held->tails, number);
      }
    };
    for (int i = 0; i < 8; ++i) drop(draw(kModelKeys));
    drop(1000 + draw(kNumTails));
    if (directory != nullptr) directory->evict(node.id, node.sequence, keys, now_);
    ++node.sequence;
  }

  std::mt19937 random_;
  TimeNs now_ = kSecond;
  std::uint64_t last_id_ = 0;
  std::map<std::string, PlainNode> nodes_;
};

/// Returns the same text as Script::status(), only from queries to the directory.
std::string describe_status(Directory& directory, TimeNs now) {
  std::map<std::string, std::string> of_node;
  for (const auto& [id, info] : directory.nodes())
    of_node[info->engine_id.value] =
        fmt::format("{} {} next {}", info->engine_id.value, info->incarnation.value, directory.repair(id).resend_from);
  NodeId probes[2];
  for (int i = 0; i < 2; ++i)
    probes[i] = directory.join(node_info("probe", 1, i == 0 ? "even" : "odd"), 0, now).value().id;
  std::vector<std::uint32_t> numbers;
  for (std::uint32_t i = 0; i < kModelKeys; ++i) numbers.push_back(i);
  for (std::uint32_t i = 0; i < kNumTails; ++i) numbers.push_back(1000 + i);
  for (const std::uint32_t number : numbers) {
    for (const NodeId probe : probes) {
      const auto holders = directory.lookup(probe, {{key_of(number)}, {}, {}}, now).value();
      for (const Holder& holder : holders)
        of_node[holder.engine_id.value] += fmt::format(" {}@{}", number, static_cast<int>(holder.tier));
    }
  }
  for (auto& [name, status] : of_node) status += " tails";
  for (const NodeId probe : probes) {
    const auto holders = directory.lookup(probe, {{}, {key_of(kGroup)}, {}}, now).value();
    for (const Holder& holder : holders) {
      for (const ChunkEntry& tail : holder.tails) {
        for (std::uint32_t i = 1000; i < 1000 + kNumTails; ++i) {
          if (tail.key == key_of(i)) of_node[holder.engine_id.value] += fmt::format(" {}", i);
        }
      }
    }
  }
  std::string status = fmt::format("last id {}\n", probes[0].value - 1);
  for (const auto& [name, text] : of_node) status += text + "\n";
  return status;
}

/// Returns the nodes and their numbers from a status.
std::string heads_of(const std::string& status) {
  std::istringstream lines(status);
  std::string heads;
  std::getline(lines, heads);
  heads += "\n";
  for (std::string name, incarnation, next, number, rest;
       lines >> name >> incarnation >> next >> number && std::getline(lines, rest);)
    heads += fmt::format("{} {} {}\n", name, incarnation, number);
  return heads;
}

struct Shared {
  std::atomic<int> begun, acknowledged, num_snapshots;
  std::atomic<std::uint64_t> kept_below[kNodesEver];  // by node id
};

class StateModel : public ::testing::TestWithParam<unsigned> {
 protected:
  StateModel() {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("kvferry-state-{}-{}", ::getpid(), GetParam());
    std::filesystem::remove_all(folder_);
    void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    shared_ = new (memory) Shared;
  }
  ~StateModel() override {
    std::filesystem::remove_all(folder_);
    ::munmap(shared_, sizeof(Shared));
  }
  static DirectoryOptions options() {
    return {.lease_ms = 1'000'000'000, .snapshot_ms = 500, .index = {.seed = GetParam(), .shared_sets_max = 4}};
  }

  /// Never returns, because the process dies in a write.
  void live_and_die(Script script, std::int64_t num_bytes) {
    class ScriptClock final : public Clock {
     public:
      explicit ScriptClock(const Script& script) : script_(script) {}
      TimeNs now() const override { return script_.now(); }

     private:
      const Script& script_;
    } const clock(script);
    static std::atomic<std::int64_t> left;
    left = num_bytes;
    StateOptions state{.folder = folder_, .log_bytes_min = 3000};
    state.write = [](int fd, const void* data, std::size_t size_bytes) -> ssize_t {
      const std::int64_t had = left.fetch_sub(static_cast<std::int64_t>(size_bytes));
      if (had >= static_cast<std::int64_t>(size_bytes)) return ::write(fd, data, size_bytes);
      if (had > 0 && ::write(fd, data, static_cast<std::size_t>(had)) < 0) ::_exit(5);
      ::_exit(9);
    };
    Directory directory(options());
    auto journal = StateJournal::open(std::move(state), directory, clock);
    if (!journal) ::_exit(6);
    std::mt19937 random(static_cast<unsigned>(num_bytes));
    for (int i = 1; i <= kNumOps; ++i) {
      shared_->begun = i;
      script.step(&directory);
      for (const auto& [name, node] : script.nodes()) {
        shared_->kept_below[node.id.value] = directory.kept_below(node.id);
      }
      if (random() % 3 != 0) (*journal)->serve(script.now());
      if (random() % 16 != 0) continue;
      (*journal)->drain();
      if ((*journal)->status(script.now()).durable) shared_->acknowledged = i;
      shared_->num_snapshots = static_cast<int>((*journal)->status(script.now()).snapshots_written);
    }
    ::_exit(0);
  }

  std::string folder_;
  Shared* shared_ = nullptr;
};

TEST_P(StateModel, ADeathAtAnyByteLosesNothingThatWasAcknowledged) {
  Script script(GetParam());
  std::mt19937 random(GetParam() + 1000);
  int num_snapshots = 0;
  for (int life = 0; life < kNumLives; ++life) {
    shared_->begun = shared_->acknowledged = shared_->num_snapshots = 0;
    for (auto& kept : shared_->kept_below) kept = 0;
    const std::int64_t num_bytes = random() % (life % 2 == 0 ? 20'000 : 300'000);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) live_and_die(script, num_bytes);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_TRUE(WEXITSTATUS(status) == 9 || WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
    num_snapshots += shared_->num_snapshots;

    Directory directory(options());
    DirectoryState state(directory);
    {
      const StateFolder folder = StateFolder::open(folder_).value();
      const LoadedState loaded = load_state(folder, state).value();
      ASSERT_EQ(loaded.damage, "");
    }
    state.finish(script.now());
    const std::string found = describe_status(directory, script.now());
    for (int i = 0; i < shared_->acknowledged; ++i) script.step(nullptr);
    int at = shared_->acknowledged;
    std::string nearest;  // the most similar status with the same nodes
    for (; script.status() != found && at < shared_->begun; ++at) {
      if (heads_of(script.status()) == heads_of(found)) nearest = script.status();
      script.step(nullptr);
    }
    ASSERT_TRUE(script.status() == found)
        << "life " << life << ", acknowledged " << shared_->acknowledged << ", begun " << shared_->begun
        << (nearest.empty() ? "; never was, last:\n" + script.status() : "; expected:\n" + nearest) << "found:\n"
        << found;
    for (const auto& [name, node] : script.nodes()) {
      ASSERT_LT(node.id.value, kNodesEver);
      ASSERT_GE(node.sequence, shared_->kept_below[node.id.value]) << name;
      const TierDigests digests = node.seen.digests();
      directory.heartbeat(node.id, node.sequence, script.now(), digests);
    }
    ASSERT_EQ(directory.num_digests_differed(), 0U);
  }
  EXPECT_GT(num_snapshots, 3) << "the run proved little";
}

INSTANTIATE_TEST_SUITE_P(Seeds, StateModel, ::testing::Range(1U, 21U));

}  // namespace
}  // namespace kvferry::controller
