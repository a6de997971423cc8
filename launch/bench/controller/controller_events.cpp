#include <unistd.h>

#include <msgpack.hpp>
#include <string>
#include <vector>

#include "controller/engines/engine_directory.h"
#include "launch/bench/controller/controller_steps.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/programs.h"
#include "transport/base/clock.h"

namespace kvferry::bench {
namespace {

using controller::EngineDirectory;

constexpr std::uint32_t kEventBlockTokens = 16;
constexpr std::uint32_t kVocabulary = 151'936;
constexpr std::uint64_t kChurnPrefixes = 256;  // number of prefixes stored and removed in each repetition

enum class Hashes { kIntegers, kBytes };

std::uint64_t hash_of(std::uint64_t prefix, std::uint64_t position) {
  return scramble(prefix * kPrefixKeys + position + 1);
}

/// Writes batches of engine events, byte for byte as vLLM's encoder writes them.
class BatchWriter {
 public:
  explicit BatchWriter(Hashes hashes) : hashes_(hashes) {}

  std::string stored(std::uint64_t prefix, std::uint64_t position) {
    begin(1);
    packer_.pack_map(9);
    text("type", "BlockStored");
    packer_.pack("block_hashes");
    packer_.pack_array(kBatchKeys);
    for (std::uint64_t i = 0; i < kBatchKeys; ++i) hash(prefix, position + i);
    packer_.pack("parent_block_hash");
    position == 0 ? nil() : hash(prefix, position - 1);
    packer_.pack("token_ids");
    packer_.pack_array(kBatchKeys * kEventBlockTokens);
    for (std::uint64_t i = 0; i < kBatchKeys * kEventBlockTokens; ++i)
      packer_.pack(token(prefix, position * kEventBlockTokens + i));
    packer_.pack("block_size");
    packer_.pack(kEventBlockTokens);
    packer_.pack("lora_id");
    nil();
    text("medium", "GPU");
    packer_.pack("lora_name");
    nil();
    packer_.pack("group_idx");
    packer_.pack(0);
    return end();
  }
  std::string removed(std::uint64_t prefix, std::uint64_t position) {
    begin(kBatchKeys);
    for (std::uint64_t i = 0; i < kBatchKeys; ++i) {
      packer_.pack_map(4);
      text("type", "BlockRemoved");
      packer_.pack("block_hashes");
      packer_.pack_array(1);
      hash(prefix, position + i);
      text("medium", "GPU");
      packer_.pack("group_idx");
      packer_.pack(0);
    }
    return end();
  }
  static std::uint32_t token(std::uint64_t prefix, std::uint64_t position) {
    return static_cast<std::uint32_t>(scramble(prefix << 32 | position) % kVocabulary);
  }

 private:
  void begin(std::uint32_t num_events) {
    buffer_.clear();
    packer_.pack_array(3);
    packer_.pack(1'700'000'000.5);
    packer_.pack_array(num_events);
  }
  std::string end() {
    packer_.pack(0);
    return {buffer_.data(), buffer_.size()};
  }
  void nil() { packer_.pack_nil(); }
  void text(const char* name, const char* value) {
    packer_.pack(name);
    packer_.pack(value);
  }
  void hash(std::uint64_t prefix, std::uint64_t position) {
    const std::uint64_t hash = hash_of(prefix, position);
    if (hashes_ == Hashes::kIntegers) {
      packer_.pack(hash);
      return;
    }
    char bytes[32] = {};
    for (unsigned i = 0; i < 8; ++i) bytes[24 + i] = static_cast<char>(hash >> (56 - 8 * i));
    packer_.pack_bin(sizeof bytes);
    packer_.pack_bin_body(bytes, sizeof bytes);
  }

  Hashes hashes_;
  msgpack::sbuffer buffer_;
  msgpack::packer<msgpack::sbuffer> packer_{buffer_};
};

struct Batch {
  std::uint32_t worker;
  std::string payload;
};

/// Counts the hashes of the decoded events and keeps nothing else.
class CountingSink final : public controller::EngineEventSink {
 public:
  void stored(const controller::BlocksStored& blocks) override {
    num_hashes += blocks.hashes.size() + (blocks.tokens.empty() ? 0 : blocks.tokens.back() & 0);
  }
  void removed(const controller::BlocksRemoved& blocks) override { num_hashes += blocks.hashes.size(); }
  void all_cleared() override {}
  std::uint64_t num_hashes = 0;
};

class EventsBench {
 public:
  explicit EventsBench(std::uint64_t num_hashes)
      : num_prefixes_(num_hashes / kPrefixKeys),
        directory_(
            {.blocks_per_holder_max = num_hashes, .blocks_max = 4 * num_hashes + (1 << 22), .index = {.seed = 1}}),
        next_(kNumWorkers) {
    for (std::uint32_t i = 0; i < kNumWorkers; ++i) {
      controller::EngineInfo info;
      info.instance_id = std::to_string(i);
      info.model = "m";
      info.endpoint = "tcp://engine:1";
      info.block_size = kEventBlockTokens;
      info.dp_rank = 0;
      engines_.push_back(directory_.add(info, 0)->id);
    }
  }

  double fill() {
    const double before = resident_bytes(::getpid());
    BatchWriter writer(Hashes::kIntegers);
    for_each_batch(0, num_prefixes_, [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
      take({worker, writer.stored(prefix, position)});
    });
    while (directory_.tidy(1024)) {
    }
    return (resident_bytes(::getpid()) - before) / static_cast<double>(num_prefixes_ * kPrefixKeys);
  }
  std::vector<Batch> batches(bool is_store, Hashes hashes) const {
    std::vector<Batch> all;
    BatchWriter writer(hashes);
    for_each_batch(
        num_prefixes_, num_prefixes_ + kChurnPrefixes,
        [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
          all.push_back({worker, is_store ? writer.stored(prefix, position) : writer.removed(prefix, position)});
        });
    return all;
  }
  void take(const Batch& batch) {
    directory_.stream(engines_[batch.worker])->received(next_[batch.worker]++, batch.payload, 0);
  }
  /// Passes each batch to take_one() and returns the rate in hashes per second.
  template <class Take>
  double time(const std::vector<Batch>& all, const Take& take_one) {
    const TimeNs begun = clock_.now();
    for (const Batch& batch : all) take_one(batch);
    const double seconds = static_cast<double>(clock_.now() - begun) * 1e-9;
    return static_cast<double>(all.size() * kBatchKeys) / seconds;
  }
  bool holds_all(bool with_churn) {
    for (const std::uint64_t prefix : {std::uint64_t{0}, num_prefixes_ - 1, num_prefixes_, num_prefixes_ + 1}) {
      controller::PromptQuery query;
      query.model = "m";
      for (std::uint64_t i = 0; i < kPrefixKeys * kEventBlockTokens; ++i)
        query.tokens.push_back(BatchWriter::token(prefix, i));
      const auto found = directory_.match(query);
      std::size_t num_whole = 0;
      for (const controller::RankMatch& match : *found) num_whole += match.in_tier[0] == query.tokens.size() ? 1 : 0;
      const bool is_there = prefix < num_prefixes_ || with_churn;
      if (num_whole != (!is_there ? 0U : has_second_worker(prefix) ? 2U : 1U)) return false;
    }
    return true;
  }

 private:
  std::uint64_t num_prefixes_;
  SteadyClock clock_;
  EngineDirectory directory_;
  std::vector<controller::EngineNumber> engines_;
  std::vector<std::uint64_t> next_;
};

}  // namespace

void measure_events(const ControllerLoad& load, ControllerReport& report) {
  report.group("engines' events");
  report.begin("vLLM");
  EventsBench bench(load.num_hashes);
  const double bytes_per_hash = bench.fill();
  std::vector<double> stored, stored_bytes, removed, decoded;
  for (const Hashes hashes : {Hashes::kIntegers, Hashes::kBytes}) {
    const std::vector<Batch> stores = bench.batches(true, hashes);
    const std::vector<Batch> removals = bench.batches(false, hashes);
    for (std::uint64_t i = 0; i < load.repeat; ++i) {
      const auto take = [&](const Batch& batch) { bench.take(batch); };
      (hashes == Hashes::kIntegers ? stored : stored_bytes).push_back(bench.time(stores, take));
      if (!bench.holds_all(true))
        throw Failure({ErrorCode::kCorrupt,
                       "the controller's index is wrong after the benchmark's events stored blocks, so the benchmark "
                       "ends without figures"});
      const double per_s = bench.time(removals, take);
      if (!bench.holds_all(false))
        throw Failure({ErrorCode::kCorrupt,
                       "the controller's index is wrong after the benchmark's events removed blocks, so the benchmark "
                       "ends without figures"});
      if (hashes == Hashes::kBytes) continue;
      removed.push_back(per_s);
      controller::EngineEventDecoder decoder;
      CountingSink sink;
      bool is_right = true;
      decoded.push_back(bench.time(stores, [&](const Batch& batch) {
        is_right = is_right && static_cast<bool>(decoder.decode(batch.payload, sink));
      }));
      if (!is_right || sink.num_hashes != stores.size() * kBatchKeys)
        throw Failure(
            {ErrorCode::kCorrupt,
             fmt::format("the controller's decoder of engine events {} and returned {} hashes instead of {}, so the "
                         "benchmark ends without figures",
                         is_right ? "accepted all events" : "rejected some events", sink.num_hashes,
                         stores.size() * kBatchKeys)});
    }
  }
  const auto row = [&](const char* what, double per_s, const char* figure) {
    report.note(what, fmt::format("{:>9.1f} M hashes/s", per_s * 1e-6));
    report.figure(figure, per_s);
  };
  report.row("vLLM", fmt::format("{:>9.1f} M hashes/s decoded and indexed, {:.1f} M decoded alone",
                                 median(stored) * 1e-6, median(decoded) * 1e-6));
  report.figure("vllm_event_hashes_per_s", median(stored));
  report.figure("vllm_event_decoded_per_s", median(decoded));
  row("vLLM, hashes of 32 bytes", median(stored_bytes), "vllm_event_hashes_per_s_bytes");
  row("vLLM, removals", median(removed), "vllm_event_removals_per_s");
  report.note("memory, indexed by hash and by tokens", fmt::format("{:>9.1f} bytes a hash", bytes_per_hash));
  report.figure("bytes_per_engine_hash", bytes_per_hash);
}

}  // namespace kvferry::bench
