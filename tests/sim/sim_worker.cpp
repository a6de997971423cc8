#include "sim_worker.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::sim {

std::uint64_t checksum_of(std::span<const Stamp> stamps) {
  Stamp sum = stamps.size();
  for (const Stamp stamp : stamps) sum = next_stamp(sum ^ stamp, 7);
  return sum;
}

Worker::Worker(std::uint32_t rank, std::uint32_t num_blocks, std::uint32_t block_tokens, std::uint32_t num_slots,
               std::uint64_t seed, std::vector<std::uint32_t> windows)
    : rank_(rank),
      block_tokens_(block_tokens),
      rank_mask_(rank * 0x5555555555555555ULL),
      windows_(std::move(windows)),
      cells_(std::size_t{num_blocks} * block_tokens, 0xdeadbeef),
      slots_(num_slots),
      rng_(seed + rank) {}

/// nullptr: the engine has given the block up.
Stamp* Worker::cell(std::span<const BlockId> table, std::uint32_t position) {
  const std::size_t index = position / block_tokens_;
  if (index >= table.size()) throw Broken(fmt::format("exact-load: position {} has no block", position));
  if (table[index] == kNullBlock) return nullptr;
  return &cells_.at(static_cast<std::size_t>(table[index]) * block_tokens_ + position % block_tokens_);
}

std::uint32_t Worker::first_attended(std::size_t group, std::uint32_t position) const {
  return windows_[group] == 0 || position < windows_[group] ? 0 : position + 1 - windows_[group];
}

void Worker::save(const SaveJob& job, std::vector<SaveDone>& done) {
  for (const SaveItem& item : job.items) {
    Slot& slot = slots_.at(item.chunk.slot);
    if (item.chunk.generation <= slot.generation)
      throw Broken(fmt::format("fenced-reuse: slot {} is written in generation {} after {}", item.chunk.slot,
                               item.chunk.generation, slot.generation));
    slot = {item.chunk.generation, {}, false};
    for (std::size_t g = 0; g < windows_.size(); ++g) {
      for (std::uint32_t i = 0; i < item.num_tokens; ++i) {
        const Stamp* from = cell(job.block_ids.at(g), item.first_token + i);
        slot.stamps.push_back(from == nullptr ? 0 : *from);
      }
    }
    const bool ok = !chance(faults_.save_fails);
    if (!ok) slot.stamps.resize(slot.stamps.size() / 2);
    done.push_back({item.chunk, ok, checksum_of(slot.stamps)});
  }
}

void Worker::load(const LoadJob& job, StepOutcome& outcome) {
  LoadDone done{job.request_id, job.attempt, 0, {}};
  bool whole = true;
  for (const LoadItem& item : job.items) {
    Slot& slot = slots_.at(item.chunk.slot);
    if (slot.generation != item.chunk.generation)
      throw Broken(fmt::format("fenced-reuse: request {} loads generation {} of slot {}, which holds {}",
                               job.request_id, item.chunk.generation, item.chunk.slot, slot.generation));
    if (chance(faults_.corrupts_load)) damage(item.chunk.slot);
    if (slot.stamps.size() != item.chunk_tokens * windows_.size() ||
        checksum_of(slot.stamps) != item.checksums.at(rank_)) {
      if (!slot.damaged) throw Broken(fmt::format("verified-only: slot {} changed while it was held", item.chunk.slot));
      done.corrupt.push_back(item.chunk);
      whole = false;
      const std::uint32_t end = item.first_token + item.num_tokens;
      for (std::uint32_t b = item.first_token / block_tokens_; b * block_tokens_ < end; ++b)
        outcome.bad_blocks.insert(job.block_ids.at(0).at(b));
      continue;
    }
    for (std::size_t g = 0; g < windows_.size(); ++g) {
      for (std::uint32_t i = 0; i < item.num_tokens; ++i) {
        if (Stamp* to = cell(job.block_ids.at(g), item.first_token + i))
          *to = slot.stamps[g * item.chunk_tokens + item.skip_tokens + i];
      }
    }
    if (whole) done.tokens_loaded += item.num_tokens;
  }
  outcome.report.loads.push_back(std::move(done));
}

std::optional<std::uint32_t> Worker::wrong_cell(const ForwardItem& item) {
  for (std::size_t g = 0; g < windows_.size(); ++g) {
    for (std::uint32_t p = first_attended(g, item.first); p < item.first + item.num; ++p) {
      const Stamp* attended = cell(item.table[g], p);
      if (attended == nullptr || *attended != (item.stamp(p) ^ mask(g))) return p;
    }
  }
  return std::nullopt;
}

StepOutcome Worker::execute(const StepPlan& plan, const std::vector<ForwardItem>& forward, bool failure_unheard) {
  StepOutcome outcome;
  outcome.report.rank = rank_;
  outcome.report.step = plan.step;
  outcome.garbage.resize(forward.size());
  for (const SaveJob& job : plan.saves_before) save(job, outcome.report.saves);
  for (const LoadJob& job : plan.loads) load(job, outcome);
  failure_unheard |= !outcome.bad_blocks.empty();
  // Layer by layer all requests write before any attends: a prefix shared within the step is there.
  for (const ForwardItem& item : forward) {
    for (std::size_t g = 0; g < windows_.size(); ++g)
      for (std::uint32_t p = item.first; p < item.first + item.num; ++p)
        if (Stamp* computed = cell(item.table[g], p)) *computed = item.stamp(p) ^ mask(g);
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < forward.size(); ++i) {
      const ForwardItem& item = forward[i];
      if (outcome.garbage[i]) continue;
      const std::optional<std::uint32_t> wrong = wrong_cell(item);
      if (!wrong) continue;
      if (!failure_unheard) {
        const bool loaded = *wrong >= item.loaded_from && *wrong < item.loaded_to;
        throw Broken(fmt::format("{}: step {}: request {} attends to wrong KV at position {} in block {}",
                                 loaded ? "exact-load" : "fenced-reuse", plan.step, item.request_id, *wrong,
                                 item.table[0][*wrong / block_tokens_]));
      }
      outcome.garbage[i] = changed = true;
      for (std::size_t g = 0; g < windows_.size(); ++g)
        for (std::uint32_t q = item.first; q < item.first + item.num; ++q)
          if (Stamp* computed = cell(item.table[g], q)) *computed = rng_();
    }
  }
  for (const SaveJob& job : plan.saves_after) save(job, outcome.report.saves);
  return outcome;
}

void Worker::wipe_cells() {
  for (Stamp& stamp : cells_) stamp = 0xdeadbeef;
}

std::vector<Stamp> Worker::read_slot(std::uint32_t slot) const {
  return slot < slots_.size() ? slots_[slot].stamps : std::vector<Stamp>{};
}

bool Worker::write_pulled(const PullItem& item, const std::vector<Stamp>& bytes) {
  Slot& slot = slots_.at(item.local.slot);
  if (item.local.generation <= slot.generation)
    throw Broken(fmt::format("fenced-reuse: slot {} is pulled into in generation {} after {}", item.local.slot,
                             item.local.generation, slot.generation));
  slot = {item.local.generation, bytes, false};
  return bytes.size() == item.num_tokens * windows_.size() && checksum_of(bytes) == item.checksums.at(rank_);
}

std::vector<Stamp> Worker::plain(std::uint32_t slot) const {
  std::vector<Stamp> stamps = slots_[slot].stamps;
  stamps.resize(stamps.size() / windows_.size());
  for (Stamp& stamp : stamps) stamp ^= mask(0);
  return stamps;
}

std::uint64_t Worker::slot_checksum(std::uint32_t slot) const { return checksum_of(slots_[slot].stamps); }

bool Worker::damage(std::uint32_t slot) {
  std::vector<Stamp>& stamps = slots_[slot].stamps;
  if (stamps.empty()) return false;
  stamps[rng_() % stamps.size()] ^= 1;
  slots_[slot].damaged = true;
  return true;
}

}  // namespace kvferry::sim
