// Runs random schedules of two workers with GPUs: gpu_schedules N [FIRST_SEED]
//
// One worker saves, evicts, resets and leases chunks; the other pulls them from frame to frame or from slot to slot,
// and loads them into blocks. Chunks of announced pushes are pulled one by one, while others are saved, or layer by
// layer while they are saved. In every third pair the model's layers are unlike. Both GPUs are simulated: their work
// runs late and in an unusual order, and they refuse calls. Whatever is reported as good is compared byte by byte. Exit
// 0 only if nothing is wrong.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <utility>

#include "tests/connector/runtime/frame_side.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

/// What happened in all schedules. All but the first two must have happened often, because otherwise they prove
/// nothing.
struct Tally {
  std::uint64_t wrong_bytes = 0, waits = 0, in_frames = 0, past_frames = 0, dropped = 0, loaded = 0, save_failures = 0,
                loaded_early = 0, pushed = 0, pushed_in_frames = 0, pushed_early = 0, grown = 0, grown_wrong = 0,
                unlike = 0;
};

class Pair {
 public:
  Pair(std::uint32_t seed, Tally& tally)
      : tally_(tally),
        has_unlike_layers_(seed % 3 == 0),
        holder_(seed, {.num_frames = 2 + seed % 7, .has_unlike_layers = has_unlike_layers_}),
        reader_(seed + 1, {.num_frames = 1 + seed % 5, .has_unlike_layers = has_unlike_layers_}),
        chunks_(kSlots) {
    reader_.meet(holder_);
  }

  void run(std::uint32_t seed) {
    random_.seed(seed);
    for (int i = 0; i < 12; ++i) {
      if (below(24) == 0) (below(2) ? holder_ : reader_).device->refuse_after(static_cast<int>(below(10)), 1);
      switch (below(7)) {
        case 0:
        case 1:
          save(below(kSlots));
          break;
        case 2:
          lease();
          break;
        case 3:
          if (below(3) == 0) end_lease();
          break;
        case 4:
          push();
          break;
        case 5:
          grow();
          break;
        default:
          pull();
      }
      holder_.device->refuse_next(0);
      reader_.device->refuse_next(0);
    }
    if (!DeviceEvent::record(*reader_.device, reader_.engine.stream()).value().wait()) std::abort();
    tally_.wrong_bytes += reader_.engine.num_wrong() - wrong_tokens_;
    wrong_tokens_ = reader_.engine.num_wrong();
    tally_.waits += std::exchange(holder_.num_waits_in_steps, 0) + std::exchange(reader_.num_waits_in_steps, 0);
  }

 private:
  struct Chunk {
    ChunkRef ref;
    std::vector<std::byte> bytes;
    std::uint32_t frame = kNoFrame;
  };
  static constexpr std::uint64_t kPushLeases = 1'000'000'000;  // numbers of leases of pushes are greater
  std::uint32_t below(std::uint32_t n) { return static_cast<std::uint32_t>(random_() % n); }

  void save(std::uint32_t slot, bool waits_for_slot = true) {
    const ChunkRef ref{slot, ++generation_};
    const auto bytes = holder_.try_save(ref, static_cast<std::uint32_t>(random_()), waits_for_slot);
    if (!bytes) ++tally_.save_failures;
    chunks_[slot] = bytes ? Chunk{ref, *bytes} : Chunk{};
  }
  void lease() {
    end_lease();
    leased_.clear();
    std::vector<ChunkRef> refs;
    for (const Chunk& chunk : chunks_) {
      if (chunk.bytes.empty() || below(2) == 0) continue;
      leased_.push_back(chunk);
      refs.push_back(chunk.ref);
    }
    const std::vector<std::uint32_t> frames = holder_.lease(++lease_, refs);
    for (std::size_t i = 0; i < leased_.size(); ++i) leased_[i].frame = frames[i];
  }
  /// Ends the lease. In half of the cases the reader goes on as if it did not know.
  void end_lease() {
    if (!holder_.link->send(seal(1, FrameUnpin{{lease_}}))) std::abort();
    if (below(2) == 0) leased_.clear();
  }
  void pull() {
    if (leased_.empty()) return;
    wait_written();
    PullOrder order = reader_.order_from(holder_, ++pulls_);
    for (std::uint32_t i = 0; i < leased_.size(); ++i)
      order.items.push_back(
          {leased_[i].ref, {i, pulls_}, kTokens, {chunk_checksum(leased_[i].bytes)}, {}, {leased_[i].frame}});
    reader_.device->hold_copies_to_host(below(2) == 0);  // half of the copies to slots are late
    const PullOutcome done = reader_.ask<PullOutcome>(order);
    tally_.in_frames += done.num_in_frames;
    tally_.past_frames += done.num_past_frames;
    for (std::uint32_t i = 0; i < leased_.size(); ++i) take_pulled(done, order.items[i], i, leased_[i].bytes);
    reader_.device->hold_copies_to_host(false);
    if (below(2) == 0) wait_written();
  }
  /// Saves up to four chunks. The reader pulls each as soon as it is saved, as chunks of an announced push; in half of
  /// the cases as soon as it is in a frame, before it is in its slot.
  void push() {
    struct Sent {
      PullOrder order;
      std::vector<std::byte> bytes;
      std::uint64_t lease = 0;
    };
    std::map<std::uint64_t, Sent> sent;  // [pull]
    wait_written();
    reader_.device->hold_copies_to_host(below(2) == 0);
    const bool is_early = below(2) == 0;
    holder_.device->hold_copies_to_host(is_early);
    const std::uint32_t first = below(kSlots), num_chunks = 1 + below(4);
    for (std::uint32_t i = 0; i < num_chunks; ++i) {
      const std::uint32_t slot = (first + i) % kSlots;
      save(slot, !is_early);
      const Chunk& chunk = chunks_[slot];
      if (chunk.bytes.empty()) continue;
      const bool lacks_slot = holder_.unsaved.contains(chunk.ref);
      Sent made{reader_.order_from(holder_, ++pulls_), chunk.bytes, kPushLeases + pulls_};
      const std::uint32_t frame = holder_.lease(made.lease, {chunk.ref}).at(0);
      made.order.items.push_back(
          {chunk.ref, {i, pulls_}, kTokens, {chunk_checksum(chunk.bytes)}, {}, {frame}, lacks_slot});
      if (lacks_slot && frame == kNoFrame) continue;  // the holder would not lease the chunk
      reader_.send(made.order);
      sent.emplace(pulls_, std::move(made));
    }
    for (std::size_t left = sent.size(); left > 0; --left) {
      const auto done = reader_.next<PullOutcome>();
      const Sent& made = sent.at(done.pull);
      take_pulled(done, made.order.items[0], 0, made.bytes);
      tally_.pushed += done.ok[0] ? 1 : 0;
      tally_.pushed_in_frames += done.ok[0] ? done.num_in_frames : 0;
      tally_.pushed_early += done.ok[0] && made.order.items[0].lacks_slots ? 1 : 0;
      if (!holder_.link->send(seal(1, FrameUnpin{{made.lease}}))) std::abort();
    }
    reader_.device->hold_copies_to_host(false);
    holder_.device->hold_copies_to_host(false);
    wait_saved();
    if (below(2) == 0) wait_written();
  }
  /// Saves a chunk in groups of layers. The reader pulls each group as soon as the holder tells of it; sometimes it is
  /// told a wrong checksum, or that the save has failed.
  void grow() {
    wait_written();
    wait_saved();
    const std::uint32_t slot = below(kSlots), seed = static_cast<std::uint32_t>(random_());
    const ChunkRef ref{slot, ++generation_};
    const std::uint64_t push = ++pushes_, lease = kPushLeases + ++pulls_;
    chunks_[slot] = {};
    PullOrder order = reader_.order_from(holder_, pulls_);
    std::uint32_t layers = 1 + below(holder_.num_layers() - 1);
    holder_.lease(lease, {});  // a worker tells nothing before it has got an order
    holder_.begin_growth(ref, seed, push, layers);
    if (holder_.store->is_saving_layers()) {
      holder_.told_layers.clear();
      if (const auto told = holder_.next_layers(200)) {
        const std::uint32_t frame = holder_.lease(lease, {ref}, 60'000, true).at(0);
        order.items.push_back({ref, {0, pulls_}, kTokens, {}, {}, {frame}, true, true});
        if (frame != kNoFrame) reader_.send(order);
        reader_.send(PullProgress{pulls_, {0}, told->done, told->of, false, {}});
        if (frame == kNoFrame) order.items.clear();
      }
    }
    if (below(2) == 0 && layers + 1 < holder_.num_layers()) holder_.grow(ref, ++layers);
    const auto bytes = holder_.try_save(ref, seed, below(2) == 0);
    if (!bytes) ++tally_.save_failures;
    if (bytes) chunks_[slot] = Chunk{ref, *bytes};
    if (!order.items.empty()) {
      const bool is_wrong = bytes && below(4) == 0;
      if (bytes) order.items[0].checksums = {chunk_checksum(*bytes) + (is_wrong ? 1 : 0)};
      reader_.send(PullProgress{pulls_, {0}, 0, 0, true, order.items[0].checksums});
      const auto done = reader_.next<PullOutcome>();
      if (done.ok[0] && (is_wrong || !bytes)) ++tally_.wrong_bytes;
      tally_.grown += done.ok[0] ? 1 : 0;
      tally_.grown_wrong += is_wrong ? 1 : 0;
      if (bytes) take_pulled(done, order.items[0], 0, *bytes);
    }
    if (!holder_.link->send(seal(1, FrameUnpin{{lease}}))) std::abort();
    wait_saved();
  }
  /// Waits until what was saved into frames is in its slots.
  void wait_saved() {
    for (Chunk& chunk : chunks_) {
      if (!holder_.unsaved.contains(chunk.ref) && !holder_.saved.contains(chunk.ref)) continue;
      if (!holder_.wait_saved(chunk.ref)) {
        ++tally_.save_failures;
        chunk = {};
        continue;
      }
      const std::size_t slot = chunk.ref.slot;
      for (std::size_t b = 0; b < chunk.bytes.size(); ++b)
        tally_.wrong_bytes += holder_.slot(slot)[b] != chunk.bytes[b];
    }
  }
  /// Checks what a pull has brought of one item, and loads it in half of the cases.
  void take_pulled(const PullOutcome& done, const PullItem& item, std::size_t index,
                   const std::vector<std::byte>& bytes) {
    if (!done.ok[index]) {
      ++tally_.dropped;
      return;
    }
    const bool is_in_frame = !done.in_frames.empty() && done.in_frames[index];
    check_slot(item, bytes, !is_in_frame);
    if (below(2) == 0) load(item, bytes);
    if (is_in_frame) unwritten_.emplace_back(item, bytes);
  }
  /// Compares a slot that other nodes may read by now. `is_whole`: they may, whatever the worker's core says.
  void check_slot(const PullItem& item, const std::vector<std::byte>& bytes, bool is_whole) {
    if (!is_whole && !reader_.core.readable(item.local)) return;
    for (std::size_t b = 0; b < bytes.size(); ++b) tally_.wrong_bytes += reader_.slot(item.local.slot)[b] != bytes[b];
  }
  /// Waits until what was pulled into frames is in its slots.
  void wait_written() {
    for (const auto& [item, bytes] : std::exchange(unwritten_, {})) {
      if (reader_.wait_written(item.local))
        check_slot(item, bytes, true);
      else
        ++tally_.dropped;
    }
  }
  void load(const PullItem& item, const std::vector<std::byte>& bytes) {
    const std::vector<std::vector<BlockId>> blocks = {{5, 6}};
    for (const BlockId block : blocks[0]) reader_.engine.overwrite(block, static_cast<std::uint32_t>(random_()));
    const bool is_early = !reader_.core.readable(item.local);
    if (reader_.load(item.local, item.checksums[0], blocks[0]) != kTokens) {
      for (const BlockId block : blocks[0]) reader_.engine.overwrite(block, 1);
      return;
    }
    ++tally_.loaded;
    tally_.unlike += has_unlike_layers_ ? 1 : 0;
    tally_.loaded_early += is_early ? 1 : 0;
    reader_.engine.note_loaded(bytes, kTokens, 0, {0, kTokens, blocks});
    reader_.engine.read({0, kTokens, blocks});
  }

  Tally& tally_;
  const bool has_unlike_layers_;
  std::mt19937 random_;
  Side holder_, reader_;
  std::vector<Chunk> chunks_;  // [slot of the holder]
  std::vector<Chunk> leased_;
  std::vector<std::pair<PullItem, std::vector<std::byte>>> unwritten_;  // chunks in frames, on their way to their slots
  std::uint64_t generation_ = 0, lease_ = 0, pulls_ = 0, pushes_ = 0, wrong_tokens_ = 0;
};

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  using namespace kvferry;
  constexpr unsigned long kSchedulesPerPair =
      5;  // a pair takes longer to start than a schedule, and avoids a path that failed
  const unsigned long num_schedules = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 100;
  const unsigned long first = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 0;
  log().set_level(spdlog::level::off);
  Tally tally;
  for (unsigned long done = 0; done < num_schedules;) {
    Pair pair(static_cast<std::uint32_t>(first + done), tally);
    for (unsigned long i = 0; i < kSchedulesPerPair && done < num_schedules; ++i)
      pair.run(static_cast<std::uint32_t>(first + done++));
  }
  std::printf(
      "%lu chunks pulled as they were announced, %lu of them from frame to frame, %lu before they were in a slot\n",
      tally.pushed, tally.pushed_in_frames, tally.pushed_early);
  std::printf("%lu chunks pulled layer by layer while they were saved; %lu with a wrong checksum\n", tally.grown,
              tally.grown_wrong);
  std::printf(
      "%lu chunks from frame to frame, %lu past frames, %lu dropped, %lu loaded, %lu of them early, %lu of them with "
      "unlike layers, %lu saves "
      "failed\n"
      "%lu schedules, %lu wrong bytes, %lu host waits in steps\n",
      tally.in_frames, tally.past_frames, tally.dropped, tally.loaded, tally.loaded_early, tally.unlike,
      tally.save_failures, num_schedules, tally.wrong_bytes, tally.waits);
  const bool has_all = tally.in_frames > 0 && tally.past_frames > 0 && tally.dropped > 0 && tally.loaded > 0 &&
                       tally.loaded_early > 0 && tally.unlike > 0 && tally.pushed > 0 && tally.pushed_in_frames > 0 &&
                       tally.pushed_early > 0 && tally.grown > 0 && tally.grown_wrong > 0;
  if (num_schedules >= 100 && !has_all) std::puts("too little happened: something is wrong with the schedules");
  return tally.wrong_bytes == 0 && tally.waits == 0 && (num_schedules < 100 || has_all) ? 0 : 1;
}
