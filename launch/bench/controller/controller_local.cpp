#include <unistd.h>

#include <algorithm>
#include <random>

#include "controller/index/placement_index.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/controller/controller_steps.h"
#include "launch/bench/harness/programs.h"

namespace kvferry::bench {
namespace {

using controller::NodeIndex;
using controller::PlacementIndex;
using controller::PrefixMatch;
using controller::ShortKey;
using controller::Tier;

constexpr TimeNs kRunTime = kSecond / 2;              // total time of the lookups in one repetition
constexpr std::uint64_t kDyingHashesMax = 1'000'000;  // largest number of hashes of the removed node
// Number of cache lines of each table that one call of tidy() visits, the same as in a turn of the server's loop.
constexpr std::size_t kTidyBucketsPerTurn = 1024;
// Largest number of prefixes that each repetition of events() adds and removes.
constexpr std::uint64_t kChurnPrefixesMax = 1024;

class LocalBench {
 public:
  LocalBench(const ControllerLoad& load, ControllerReport& report)
      : num_prefixes_(load.num_prefixes()), repeat_(load.repeat), report_(report) {}

  void run() {
    report_.group("64-bit keys");
    measure_index<ShortKey>("64");
    measure_random_replicas();
    report_.group("128-bit keys");
    measure_index<ChunkKey>("128");
    report_.group("directory");
    measure_directory();
  }

 private:
  /// Measures lookups. `ask(prefix, position)` prepares a lookup; `answer()` performs the lookup and returns whether
  /// the answer was right. Only answer() is timed.
  template <class Ask, class Answer>
  Speed time(std::uint64_t num_keys, const Ask& ask, const Answer& answer) {
    std::vector<Speed> speeds;
    for (std::uint64_t i = 0; i < repeat_; ++i) {
      std::vector<double> times_us;
      TimeNs total = 0;
      while (total < kRunTime) {
        ask(random_() % num_prefixes_, random_() % (kPrefixKeys / num_keys) * num_keys);
        const TimeNs begun = clock_.now();
        const bool is_right = answer();
        const TimeNs took = clock_.now() - begun;
        if (!is_right) throw wrong_answer();
        times_us.push_back(static_cast<double>(took) * 1e-3);
        total += took;
      }
      speeds.push_back(speed_of(times_us));
    }
    return median_speed(speeds);
  }

  /// Measures a lower bound for the lookup time of any hash table: reads one random cache line for each key, with
  /// prefetching, from an array that has the size of all keys and 32 bits for each key.
  Speed random_lines(std::uint64_t num_keys, std::size_t key_bytes) {
    const std::uint64_t num_lines = num_prefixes_ * kPrefixKeys * (key_bytes + 4) / 64;
    controller::PageMemory memory(num_lines * 64);
    auto* lines = static_cast<std::uint64_t*>(memory.data());
    for (std::uint64_t i = 0; i < num_lines; ++i) lines[i * 8] = i + 1;
    std::vector<ShortKey> keys(num_keys);
    const auto line_of = [&](ShortKey key) { return lines + (key >> 32) * num_lines / (std::uint64_t{1} << 32) * 8; };
    constexpr std::size_t kAhead = 32;
    return time(
        num_keys, [&](std::uint64_t prefix, std::uint64_t position) { fill_keys<ShortKey>(prefix, position, keys); },
        [&] {
          std::uint64_t is_right = 1;
          for (std::size_t i = 0; i < kAhead; ++i) __builtin_prefetch(line_of(keys[i]));
          for (std::size_t i = 0; i < num_keys; ++i) {
            if (i + kAhead < num_keys) __builtin_prefetch(line_of(keys[i + kAhead]));
            is_right &= static_cast<std::uint64_t>(*line_of(keys[i]) != 0);
          }
          return is_right == 1;
        });
  }

  template <class Key>
  Speed lookups(PlacementIndex<Key>& index, std::uint64_t num_keys) {
    std::vector<Key> keys(num_keys);
    std::vector<PrefixMatch> matches;
    std::size_t num_holders = 0;
    return time(
        num_keys,
        [&](std::uint64_t prefix, std::uint64_t position) {
          fill_keys<Key>(prefix, position, keys);
          num_holders = has_second_worker(prefix) ? 2 : 1;
        },
        [&] {
          index.lookup(keys, std::nullopt, matches);
          bool is_right = matches.size() == num_holders;
          for (const PrefixMatch& match : matches) is_right = is_right && match.num_keys == num_keys;
          return is_right;
        });
  }

  template <class Key>
  void measure_index(const std::string& bits) {
    constexpr bool is_short = sizeof(Key) == sizeof(ShortKey);
    const std::string suffix = is_short ? "" : "_" + bits + "bit";
    report_.begin("memory");
    const double before_bytes = resident_bytes(::getpid());
    PlacementIndex<Key> index({.seed = 1});
    for (std::uint32_t i = 0; i < kNumWorkers; ++i) index.add_node();
    load(index, 0, num_prefixes_);
    const double bytes_per_hash = (resident_bytes(::getpid()) - before_bytes) / static_cast<double>(index.num_keys());
    report_.row("memory", fmt::format("{:>9.1f} bytes a hash", bytes_per_hash));
    report_.figure("bytes_per_hash_" + bits, bytes_per_hash);

    for (const std::uint64_t num_keys : {std::uint64_t{128}, kPrefixKeys}) {
      report_.begin(fmt::format("lookup of {} keys", num_keys));
      report_.speed_row(fmt::format("lookup of {} keys", num_keys), lookups(index, num_keys),
                        fmt::format("lookup_{}{}", num_keys, suffix));
      if (num_keys != 128) continue;
      report_.begin("128 random cache lines of an array");
      report_.speed_row("128 random cache lines of an array", random_lines(num_keys, sizeof(Key)),
                        "random_lines_128" + suffix);
    }
    report_.begin("events");
    const double hashes_per_s = events(index);
    report_.row("events", fmt::format("{:>9.1f} M hashes/s", hashes_per_s * 1e-6));
    report_.figure("packed_event_hashes_per_s" + suffix, hashes_per_s);
    if constexpr (is_short) measure_death(index);
  }

  /// Measures the memory of an index in which each key has random holders, out of 1024 nodes with four tiers each.
  /// Random holders are the worst case, because the index stores equal sets of holders only once.
  void measure_random_replicas() {
    report_.begin("memory, random holders");
    const double before_bytes = resident_bytes(::getpid());
    PlacementIndex<ShortKey> index({.seed = 1});
    for (std::uint32_t i = 0; i < 1024; ++i) index.add_node();
    std::vector<ShortKey> keys(kPrefixKeys);
    for (std::uint64_t prefix = 0; prefix < num_prefixes_; ++prefix) {
      fill_keys<ShortKey>(prefix, 0, keys);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        for (std::size_t copies = 1 + i % 2; copies > 0; --copies)
          index.add(random_() % 1024, static_cast<Tier>(random_() % 4), std::span(keys).subspan(i, 1));
      }
    }
    const double bytes_per_hash = (resident_bytes(::getpid()) - before_bytes) / static_cast<double>(index.num_keys());
    report_.row("memory, random holders on 1024 nodes x 4 tiers", fmt::format("{:>9.1f} bytes a hash", bytes_per_hash));
    report_.figure("bytes_per_hash_64_random_replicas", bytes_per_hash);
  }

  template <class Key>
  void load(PlacementIndex<Key>& index, std::uint64_t begin, std::uint64_t end) {
    std::vector<Key> keys(kBatchKeys);
    for_each_batch(begin, end, [&](NodeIndex worker, std::uint64_t prefix, std::uint64_t position) {
      fill_keys<Key>(prefix, position, keys);
      index.add(worker, Tier::kHost, std::span<const Key>(keys));
    });
    while (index.tidy(kTidyBucketsPerTurn)) {
    }
  }

  /// Adds new prefixes and removes them again, in batches, so that the index keeps its size. Returns the rate in hashes
  /// per second; adding a hash and removing it count as two.
  template <class Key>
  double events(PlacementIndex<Key>& index) {
    const std::uint64_t num_churned = std::min(kChurnPrefixesMax, num_prefixes_ / 2);
    std::vector<double> rates;
    std::vector<Key> keys;
    for (std::uint64_t i = 0; i < repeat_; ++i) {
      TimeNs took = 0;
      std::uint64_t num_handled = 0;
      for (const bool is_store : {true, false}) {
        struct KeyBatch {
          NodeIndex worker;
          std::uint64_t first;
        };
        std::vector<KeyBatch> batches;
        keys.clear();
        for_each_batch(num_prefixes_, num_prefixes_ + num_churned,
                       [&](NodeIndex worker, std::uint64_t prefix, std::uint64_t position) {
                         batches.push_back({worker, keys.size()});
                         keys.resize(keys.size() + kBatchKeys);
                         fill_keys<Key>(prefix, position, std::span(keys).last(kBatchKeys));
                       });
        const TimeNs begun = clock_.now();
        for (const KeyBatch& batch : batches) {
          const auto some = std::span<const Key>(keys).subspan(batch.first, kBatchKeys);
          num_handled +=
              is_store ? index.add(batch.worker, Tier::kHost, some) : index.remove(batch.worker, Tier::kHost, some);
        }
        took += clock_.now() - begun;
      }
      rates.push_back(static_cast<double>(num_handled) * 1e9 / static_cast<double>(took));
    }
    return median(rates);
  }

  /// Measures the slowest lookup after the removal of a node. The node is removed right before the first lookup. Before
  /// each further lookup, tidy() cleans up a part of the index, as in the server's loop. The times of the removal and
  /// of tidy() count too, because a lookup at the server would wait for them.
  void measure_death(PlacementIndex<ShortKey>& index) {
    const std::uint64_t num_held = std::min(kDyingHashesMax / kPrefixKeys, num_prefixes_);
    report_.begin(fmt::format("slowest lookup while a node of {} hashes is removed", num_held * kPrefixKeys));
    std::vector<ShortKey> keys(128);
    std::vector<PrefixMatch> matches;
    std::vector<double> worst_us, usual_us;
    for (std::uint64_t i = 0; i < repeat_; ++i) {
      const NodeIndex node = index.add_node();
      std::vector<ShortKey> held(kPrefixKeys);
      for (std::uint64_t prefix = 0; prefix < num_held; ++prefix) {
        fill_keys<ShortKey>(prefix, 0, held);
        index.add(node, Tier::kHost, std::span<const ShortKey>(held));
      }
      while (index.tidy(kTidyBucketsPerTurn)) {
      }
      const auto ask = [&](TimeNs& slowest, const auto& before) {
        fill_keys<ShortKey>(random_() % num_prefixes_, 0, keys);
        const TimeNs asked = clock_.now();
        const bool goes_on = before();
        index.lookup(keys, std::nullopt, matches);
        slowest = std::max(slowest, clock_.now() - asked);
        return goes_on;
      };
      TimeNs worst = 0, usual = 0;
      const TimeNs begun = clock_.now();
      ask(worst, [&] { return index.remove_node(node), true; });
      while (ask(worst, [&] { return index.tidy(kTidyBucketsPerTurn); })) {
      }
      const TimeNs ended = clock_.now();  // as much time follows without a removal, to compare
      while (ask(usual, [&] { return clock_.now() < 2 * ended - begun; })) {
      }
      worst_us.push_back(static_cast<double>(worst) * 1e-3);
      usual_us.push_back(static_cast<double>(usual) * 1e-3);
    }
    report_.row("worst lookup while a node dies",
                fmt::format("{:>9.1f} us   ({:.1f} us while no node dies)", median(worst_us), median(usual_us)));
    report_.figure("worst_lookup_us_node_dies", median(worst_us));
    report_.figure("worst_lookup_us_at_rest", median(usual_us));
  }

  /// Measures the directory in this process, without a server.
  void measure_directory() {
    report_.begin("publishing");
    controller::Directory directory(
        {.chunks_per_node_max = kControllerHashesMax, .chunks_max = 2 * kControllerHashesMax, .index = {.seed = 1}});
    DirectoryWorkers workers(directory, 0);
    const controller::NodeId asker = workers.join(node_info("asker"), 0);
    std::vector<controller::ChunkEntry> chunks(kBatchKeys);
    TimeNs took = 0;
    for_each_batch(0, num_prefixes_, [&](NodeIndex worker, std::uint64_t prefix, std::uint64_t position) {
      fill_chunks(prefix, position, chunks);
      const TimeNs begun = clock_.now();
      workers.publish(worker, chunks, 0);
      took += clock_.now() - begun;
    });
    const double chunks_per_s = static_cast<double>(directory.num_chunks()) * 1e9 / static_cast<double>(took);
    report_.row("publishing into a directory that begins empty",
                fmt::format("{:>9.1f} M chunks/s", chunks_per_s * 1e-6));
    report_.figure("directory_publish_chunks_per_s", chunks_per_s);

    report_.begin("lookup of 128 chunks");
    controller::LookupQuery query;
    std::uint64_t asked_prefix = 0;
    const Speed speed = time(
        kLookupKeys,
        [&](std::uint64_t prefix, std::uint64_t position) { query = query_of(asked_prefix = prefix, position); },
        [&] {
          const auto holders = directory.lookup(asker, query, 0);
          return holders && names_all_workers(*holders, asked_prefix);
        });
    report_.speed_row("lookup of 128 chunks", speed, "directory_lookup_128");
  }

  std::uint64_t num_prefixes_;
  std::uint64_t repeat_;
  ControllerReport& report_;
  SteadyClock clock_;
  std::mt19937_64 random_{1};
};

}  // namespace

void measure_local(const ControllerLoad& load, ControllerReport& report) { LocalBench(load, report).run(); }

}  // namespace kvferry::bench
