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
               std::uint64_t seed)
    : rank_(rank),
      block_tokens_(block_tokens),
      mask_(rank * 0x5555555555555555ULL),
      cells_(std::size_t{num_blocks} * block_tokens, 0xdeadbeef),
      slots_(num_slots),
      rng_(seed + rank) {}

Stamp& Worker::cell(std::span<const BlockId> table, std::uint32_t position) {
  const std::size_t index = position / block_tokens_;
  if (index >= table.size() || table[index] <= 0) throw Broken(fmt::format("position {} has no block", position));
  return cells_.at(static_cast<std::size_t>(table[index]) * block_tokens_ + position % block_tokens_);
}

void Worker::save(const SaveJob& job, std::vector<SaveDone>& done) {
  for (const SaveItem& item : job.items) {
    Slot& slot = slots_.at(item.chunk.slot);
    if (item.chunk.generation <= slot.generation)
      throw Broken(fmt::format("slot {} is written in generation {} after {}", item.chunk.slot, item.chunk.generation,
                               slot.generation));
    slot = {item.chunk.generation, {}, false};
    for (std::uint32_t i = 0; i < item.num_tokens; ++i)
      slot.stamps.push_back(cell(job.block_ids.at(0), item.first_token + i));
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
      throw Broken(fmt::format("request {} loads generation {} of slot {}, which holds {}", job.request_id,
                               item.chunk.generation, item.chunk.slot, slot.generation));
    if (chance(faults_.corrupts_load)) {
      slot.stamps[rng_() % slot.stamps.size()] ^= 1;
      slot.damaged = true;
    }
    if (slot.stamps.size() != item.chunk_tokens || checksum_of(slot.stamps) != item.checksums.at(rank_)) {
      if (!slot.damaged) throw Broken(fmt::format("slot {} changed while it was held", item.chunk.slot));
      done.corrupt.push_back(item.chunk);
      whole = false;
      const std::uint32_t end = item.first_token + item.num_tokens;
      for (std::uint32_t b = item.first_token / block_tokens_; b * block_tokens_ < end; ++b)
        outcome.bad_blocks.insert(job.block_ids.at(0).at(b));
      continue;
    }
    for (std::uint32_t i = 0; i < item.num_tokens; ++i)
      cell(job.block_ids.at(0), item.first_token + i) = slot.stamps[item.skip_tokens + i];
    if (whole) done.tokens_loaded += item.num_tokens;
  }
  outcome.report.loads.push_back(std::move(done));
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
    for (std::uint32_t p = item.first; p < item.first + item.num; ++p) cell(item.table, p) = item.stamps->at(p) ^ mask_;
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < forward.size(); ++i) {
      const ForwardItem& item = forward[i];
      if (outcome.garbage[i]) continue;
      for (std::uint32_t p = 0; p < item.first + item.num; ++p) {
        if (cell(item.table, p) == (item.stamps->at(p) ^ mask_)) continue;
        if (!failure_unheard)
          throw Broken(fmt::format("step {}: request {} attends to wrong KV at position {} in block {}", plan.step,
                                   item.request_id, p, item.table[p / block_tokens_]));
        outcome.garbage[i] = changed = true;
        for (std::uint32_t q = item.first; q < item.first + item.num; ++q) cell(item.table, q) = rng_();
        break;
      }
    }
  }
  for (const SaveJob& job : plan.saves_after) save(job, outcome.report.saves);
  return outcome;
}

bool Worker::write_pulled(const PullItem& item, const std::vector<Stamp>& bytes) {
  Slot& slot = slots_.at(item.local.slot);
  if (item.local.generation <= slot.generation)
    throw Broken(fmt::format("slot {} is pulled into in generation {} after {}", item.local.slot, item.local.generation,
                             slot.generation));
  slot = {item.local.generation, bytes, false};
  return bytes.size() == item.num_tokens && checksum_of(bytes) == item.checksums.at(rank_);
}

std::vector<Stamp> Worker::plain(std::uint32_t slot) const {
  std::vector<Stamp> stamps = slots_[slot].stamps;
  for (Stamp& stamp : stamps) stamp ^= mask_;
  return stamps;
}

}  // namespace kvferry::sim
