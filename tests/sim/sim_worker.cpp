#include "sim_worker.h"

#include <fmt/format.h>

#include <algorithm>

#include "sim_blocks.h"

namespace kvferry::sim {

std::uint64_t checksum_of(std::span<const Stamp> stamps) {
  Stamp sum = stamps.size();
  for (const Stamp stamp : stamps) sum = next_stamp(sum ^ stamp, 7);
  return sum;
}

Worker::Worker(std::uint32_t rank, Shard shard, std::uint32_t num_blocks, std::uint32_t num_slots, std::uint64_t seed,
               std::vector<KvGroup> groups, ShardParts parts)
    : rank_(rank),
      shard_(shard),
      parts_(std::move(parts)),
      groups_(std::move(groups)),
      cells_(cells_of(shard_, parts_, groups_)),
      slots_(num_slots),
      rng_(seed + rank) {
  std::size_t num_tensors = 0;
  for (const Cell& cell : cells_) {
    rows_ = std::max(rows_, cell.offset + cell.num_stamps(groups_[cell.group].block_tokens));
    num_tensors = std::max(num_tensors, cell.tensor + 1);
  }
  memory_.assign(num_tensors, std::vector<Stamp>(num_blocks * rows_, 0xdeadbeef));
}

std::size_t Worker::layers_stamps(std::uint32_t num_layers, std::uint32_t num_tokens) const {
  std::size_t num = 0;
  for (const Cell& cell : cells_)
    if (cell.layer < shard_.first_layer + num_layers) num += cell.num_stamps(num_tokens);
  return num;
}

std::span<Stamp> Worker::find_block(const Cell& cell, std::span<const BlockId> table, std::uint32_t position) {
  const std::uint32_t block_tokens = groups_[cell.group].block_tokens;
  const std::size_t index = position / block_tokens;
  if (index >= table.size()) throw Broken(fmt::format("exact-load: position {} has no block", position));
  if (table[index] == kNullBlock || table[index] == kNoBlock) return {};
  const std::size_t first = static_cast<std::size_t>(table[index]) * rows_ + cell.offset;
  return std::span(memory_[cell.tensor]).subspan(first, cell.num_stamps(block_tokens));
}

Stamp* Worker::find(const Cell& cell, std::span<const BlockId> table, std::uint32_t position) {
  const std::span<Stamp> block = find_block(cell, table, position);
  return block.empty() ? nullptr : &block[position % groups_[cell.group].block_tokens];
}

/// Reads the state after the tokens before the item from the last block of these tokens, and writes the state after the
/// item's tokens into their last block.
void Worker::advance_state(const ForwardItem& item, const Cell& cell, std::uint64_t step) {
  if (cell.is_padding) return;
  const std::vector<BlockId>& table = item.table[cell.group];
  if (item.first > 0) {
    const std::span<const Stamp> state = find_block(cell, table, item.first - 1);
    bool is_right = !state.empty();
    for (std::size_t i = 0; i < state.size(); ++i)
      is_right = is_right && state[i] == (item.stamp(item.first - 1) ^ cell.mask(i));
    if (!is_right)
      throw Broken(fmt::format("exact-load: step {}: request {} goes on at {} from a wrong state", step,
                               item.request_id, item.first));
  }
  const std::uint32_t end = item.first + item.num;
  for (const std::uint32_t at :
       {end, checkpoint_in(item.first, end, groups_[cell.group].block_tokens, checkpoint_alignment_)}) {
    if (at == 0) continue;
    const std::span<Stamp> state = find_block(cell, table, at - 1);
    for (std::size_t i = 0; i < state.size(); ++i) state[i] = item.stamp(at - 1) ^ cell.mask(i);
  }
}

void Worker::save(const SaveJob& job, std::vector<SaveDone>& done) {
  for (const SaveItem& item : job.items) {
    Slot& slot = slots_.at(item.chunk.slot);
    start_write(slot, item.chunk, "written");
    for (const Cell& cell : cells_) {
      const std::vector<BlockId>& table = job.block_ids.at(cell.group);
      const std::span<const Stamp> part =
          cell.is_part() ? find_block(cell, table, item.first_token) : std::span<Stamp>();
      slot.stamps.insert(slot.stamps.end(), part.begin(), part.end());
      if (cell.is_part() && part.empty()) slot.stamps.resize(slot.stamps.size() + cell.size);
      for (std::uint32_t i = 0; !cell.is_part() && i < item.num_tokens; ++i) {
        const Stamp* from = find(cell, table, item.first_token + i);
        slot.stamps.push_back(from == nullptr ? 0 : *from);
      }
    }
    const bool ok = !chance(faults_.save_fails);
    if (item.push != 0 && chance(grows_) &&
        frames_->begin(item.chunk, FrameTable::State::kGathering, slot.stamps.size())) {
      growing_[item.chunk] = {item, std::exchange(slot.stamps, {}), ok};
      growths_begun_.push_back(item);
      continue;
    }
    if (!ok) slot.stamps.resize(slot.stamps.size() / 2);
    done.push_back({item.chunk, ok, checksum_of(slot.stamps)});
    const PushedSave pushed{item.push, item.push_index, item.chunk, ok, done.back().checksum};
    if (ok && frames_->write(item.chunk, FrameTable::State::kGathering, slot.stamps, done.back().checksum)) {
      if (chance(saves_early_)) {
        done.back().is_in_frame = slot.is_in_frame_only = true;
        slot.stamps.clear();
        if (item.push != 0) reached_frame(pushed);
        continue;
      }
      frames_->written_back(item.chunk, true);
    }
    if (item.push != 0) pushed_.push_back(pushed);
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
    const std::vector<Stamp>* const in_frame = frames_->find(item.chunk);
    const std::vector<Stamp>& stamps = in_frame != nullptr ? *in_frame : slot.stamps;
    if (stamps.size() != chunk_stamps(item.chunk_tokens) || checksum_of(stamps) != item.checksums.at(rank_)) {
      if (slot.damaged_at.empty() && !slot.is_lost)
        throw Broken(fmt::format("verified-only: slot {} changed while it was held", item.chunk.slot));
      done.corrupt.push_back(item.chunk);
      whole = false;
      const std::uint32_t end = item.first_token + item.num_tokens;
      for (std::uint32_t b = item.first_token / groups_[0].block_tokens;
           !job.is_async && b * groups_[0].block_tokens < end; ++b)
        outcome.bad_blocks.insert(job.block_ids.at(0).at(b));
      continue;
    }
    const bool is_whole = item.skip_tokens == 0 && item.num_tokens == item.chunk_tokens;
    if (has_parts() && !is_whole)
      throw Broken(fmt::format("exact-load: request {} loads a part of a chunk with a state", job.request_id));
    std::size_t at = 0;
    for (const Cell& cell : cells_) {
      const std::vector<BlockId>& table = job.block_ids.at(cell.group);
      for (std::uint32_t i = 0; !cell.is_part() && i < item.num_tokens; ++i)
        if (Stamp* to = find(cell, table, item.first_token + i)) *to = stamps[at + item.skip_tokens + i];
      const std::span<Stamp> part = cell.is_part() ? find_block(cell, table, item.first_token) : std::span<Stamp>();
      std::copy_n(stamps.begin() + static_cast<std::ptrdiff_t>(at), part.size(), part.begin());
      at += cell.num_stamps(item.chunk_tokens);
    }
    if (whole) done.tokens_loaded += item.num_tokens;
  }
  if (job.is_async) outcome.async_ok.push_back(whole);
  outcome.report.loads.push_back(std::move(done));
}

/// Writes what may lie in a slot that is being written: anything.
void Worker::unpack_ahead() {
  for (const LoadJob& job : ahead_)
    for (const LoadItem& item : job.items)
      for (std::uint32_t i = 0; i < item.num_tokens; ++i)
        if (Stamp* to = find(cells_[rng_() % cells_.size()], job.block_ids.at(0), item.first_token + i)) *to = rng_();
}

std::optional<std::uint32_t> Worker::wrong_cell(const ForwardItem& item) {
  for (const Cell& cell : cells_) {
    const KvGroup& group = groups_[cell.group];
    for (std::uint32_t p = first_attended(group, item.first); group.window != kState && p < item.first + item.num;
         ++p) {
      const Stamp* attended = find(cell, item.table[cell.group], p);
      if (attended == nullptr || *attended != (item.stamp(p) ^ cell.token_mask)) return p;
    }
  }
  return std::nullopt;
}

StepOutcome Worker::execute(const StepPlan& plan, const std::vector<ForwardItem>& forward, bool failure_unheard) {
  StepOutcome outcome;
  outcome.report.rank = rank_;
  outcome.report.step = plan.step;
  outcome.garbage.resize(forward.size());
  outcome.report.saves = std::exchange(grown_, {});
  for (const SaveJob& job : plan.saves_before) save(job, outcome.report.saves);
  ahead_.insert(ahead_.end(), plan.ahead.begin(), plan.ahead.end());
  for (const auto* jobs : {&plan.loads, &plan.abandoned})
    for (const LoadJob& job : *jobs)
      std::erase_if(ahead_, [&](const LoadJob& ahead) {
        return ahead.request_id == job.request_id && ahead.attempt == job.attempt;
      });
  for (const LoadJob& job : plan.loads) load(job, outcome);
  for (const LoadJob& job : plan.abandoned) {
    outcome.async_ok.push_back(false);
    outcome.report.loads.push_back({job.request_id, job.attempt, 0, {}});
  }
  unpack_ahead();
  failure_unheard |= !outcome.bad_blocks.empty();
  // In each layer, all requests write before any request attends, so the requests of a step can share a prefix.
  for (const ForwardItem& item : forward) {
    for (const Cell& cell : cells_) {
      if (groups_[cell.group].window == kState) {
        advance_state(item, cell, plan.step);
        continue;
      }
      for (std::uint32_t p = item.first; p < item.first + item.num; ++p)
        if (Stamp* computed = find(cell, item.table[cell.group], p)) *computed = item.stamp(p) ^ cell.token_mask;
    }
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
                                 item.table[0][*wrong / groups_[0].block_tokens]));
      }
      outcome.garbage[i] = changed = true;
      for (const Cell& cell : cells_)
        for (std::uint32_t q = item.first; !cell.is_part() && q < item.first + item.num; ++q)
          if (Stamp* computed = find(cell, item.table[cell.group], q)) *computed = rng_();
    }
  }
  for (const SaveJob& job : plan.saves_after) save(job, outcome.report.saves);
  return outcome;
}

void Worker::wipe_cells() {
  for (std::vector<Stamp>& cell : memory_) std::fill(cell.begin(), cell.end(), 0xdeadbeef);
}

}  // namespace kvferry::sim
