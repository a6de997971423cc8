// Plans which chunks of a request are saved, and when.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/scheduler/scheduler_core.h"

namespace kvferry {

/// Returns true if the next chunk to save is computed, but request.chain does not have all computed tokens yet.
bool SchedulerCore::lacks_tokens(const RequestState& request) const {
  const std::uint32_t next_end = request.saved + config_.chunk_tokens;
  return request.computed >= next_end && request.chain.size() < request.computed &&
         (config_.save_decode_cache || next_end <= request.num_prompt_tokens);
}

/// Plans saves of the full chunks that are computed and whose save was not tried yet. Returns the number of tokens that
/// may be saved.
std::uint32_t SchedulerCore::plan_full_chunks(RequestState& request, std::vector<SaveJob>& jobs) {
  const std::uint32_t chunk_tokens = config_.chunk_tokens;
  std::uint32_t savable = std::min(request.computed, request.chain.size());
  if (!config_.save_decode_cache) savable = std::min(savable, request.num_prompt_tokens);
  for (; request.saved + chunk_tokens <= savable; request.saved += chunk_tokens) {
    if (const auto item = plan_chunk(request, request.saved / chunk_tokens, chunk_tokens))
      append_save(request, *item, jobs);
  }
  return savable;
}

/// Plans saves of full chunks as they fill, and of the prompt's tail if a decode worker will read it.
void SchedulerCore::plan_running_saves(RequestState& request, StepPlan& plan) {
  const std::uint32_t chunk_tokens = config_.chunk_tokens;
  const std::uint32_t savable = plan_full_chunks(request, plan.saves_after);
  const std::uint32_t prompt = reusable(request.num_prompt_tokens);
  if (request.handoff && savable >= prompt && request.last_tail_end < prompt) {
    const std::uint32_t full = prompt / chunk_tokens;
    const std::uint32_t rest = prompt % chunk_tokens;
    if (rest == 0) return;
    if (const auto item = plan_chunk(request, full, rest)) append_save(request, *item, plan.saves_after);
  }
}

/// Plans the last saves of a request that loses its blocks. Computed chunks that are not in the pool are saved at the
/// start of the next step.
void SchedulerCore::plan_leftover_saves(RequestState& request, bool tail) {
  if (!request.cacheable || config_.only_reads) return;
  const std::uint32_t savable = reusable(plan_full_chunks(request, saves_before_next_));
  if (tail && savable > request.saved) {
    if (const auto item = plan_chunk(request, request.saved / config_.chunk_tokens, savable - request.saved))
      append_save(request, *item, saves_before_next_);
  }
}

/// Returns a KV group's blocks of the tokens [first_token, end_token), with kNoBlock for each block that lies before
/// the group's window once `window_end` tokens are computed. In place of such a block the table has the null block or,
/// if the table is from an earlier step, a block that another request may use by now.
std::vector<BlockId> SchedulerCore::blocks_of(const BlockTable& table, std::size_t group, std::uint32_t first_token,
                                              std::uint32_t end_token, std::uint32_t window_end) const {
  const std::vector<BlockId>& all = table[group];
  const std::uint32_t block_tokens = config_.groups[group].block_tokens;
  const auto end = std::min<std::size_t>((end_token + block_tokens - 1) / block_tokens, all.size());
  const auto begin = std::min<std::size_t>(first_token / block_tokens, end);
  std::vector<BlockId> blocks(all.begin() + static_cast<std::ptrdiff_t>(begin),
                              all.begin() + static_cast<std::ptrdiff_t>(end));
  if (config_.groups[group].window == 0) return blocks;
  const std::uint32_t first_held = window_start(group, window_end) / block_tokens;
  for (std::size_t i = 0; i < blocks.size(); ++i)
    if (begin + i < first_held || blocks[i] == kNullBlock) blocks[i] = kNoBlock;
  return blocks;
}

/// Returns the argument `window_end` of blocks_of() for a save of the chunk that ends at `end`. Models with state have
/// a state only at the last step's start, at its end and perhaps at a checkpoint (core_config.h) between them. For a
/// chunk that ends elsewhere, `end` + 1 makes the save leave out the state.
std::uint32_t SchedulerCore::window_end_of_chunk(const RequestState& request, std::uint32_t end) const {
  if (!config_.keeps_state) return request.window_end;
  const bool has_state = end == request.step_end || end == request.window_end || end == request.checkpoint;
  return has_state ? end : end + 1;
}

/// Returns false if the engine has freed a block that a save of these tokens needs.
bool SchedulerCore::has_blocks(const RequestState& request, std::uint32_t first_token, std::uint32_t end) const {
  if (request.blocks.size() != config_.groups.size()) return false;
  for (std::size_t group = 0; group < request.blocks.size(); ++group) {
    const std::uint32_t block_tokens = config_.groups[group].block_tokens;
    const std::uint32_t held_from = window_start(group, window_end_of_chunk(request, end));
    const std::uint32_t first_block = std::max(first_token, held_from) / block_tokens;
    const std::uint32_t end_block = (end + block_tokens - 1) / block_tokens;
    const std::vector<BlockId>& blocks = request.blocks[group];
    for (std::size_t i = first_block; i < std::min<std::size_t>(end_block, blocks.size()); ++i)
      if (blocks[i] == kNullBlock) return false;
  }
  return true;
}

/// Reserves a slot for chunk `chunk` of the request. Returns nullopt if a chunk with this key is being written, if the
/// pool has the chunk and a save would add no state, if the engine has freed a block that the save needs, or if no slot
/// can be reserved.
std::optional<SaveItem> SchedulerCore::plan_chunk(RequestState& request, std::uint32_t chunk,
                                                  std::uint32_t num_tokens) {
  ChunkMeta meta = request.chain.meta(chunk, num_tokens);
  const bool is_tail = meta.is_tail;
  const std::uint32_t end = chunk * config_.chunk_tokens + num_tokens;
  const auto remember_tail = [&](ChunkRef tail) {
    if (request.last_tail && *request.last_tail != tail) pool_.demote(*request.last_tail);
    request.last_tail = is_tail ? std::optional(tail) : std::nullopt;
    request.last_tail_end = is_tail ? end : 0;
  };
  const std::uint32_t start = chunk * config_.chunk_tokens;
  for (std::size_t group = 0; group < config_.groups.size(); ++group) {
    const std::uint32_t from = std::clamp(window_start(group, window_end_of_chunk(request, end)), start, end) - start;
    meta.window_from = std::max(meta.window_from, from);
    if (has_unlike_windows_) meta.windows_from.push_back(from);
  }
  const ChunkPool::Slot* present = find_chunk(meta.key, num_tokens);
  if (present != nullptr && (meta.window_from > 0 || !lacks_state(*present))) {
    if (is_tail) remember_tail(present->ref);
    return std::nullopt;
  }
  if (present != nullptr) pool_.invalidate(present->ref);
  if (pool_.find(meta.key) != nullptr) return std::nullopt;  // a chunk of this key but another length is being written
  if (!has_blocks(request, start, end)) return std::nullopt;
  const std::optional<ChunkRef> slot = pool_.reserve(meta, "save of " + request.id.value, request.givers);
  if (!slot) {
    counters_.pool_full += 1;
    request.pool_was_full = true;
    return std::nullopt;
  }
  saving_.insert(*slot);
  name_chunk(request, *slot, start);
  const PushSender::Tag tag = sender_.saving(meta.key, *slot, now_).value_or(PushSender::Tag{});
  if (is_tail || (request.last_tail && end > request.last_tail_end)) remember_tail(*slot);
  return SaveItem{*slot, chunk * config_.chunk_tokens, num_tokens, tag.push, tag.index};
}

/// Adds a job with this one item and the blocks that the item covers.
void SchedulerCore::append_save(const RequestState& request, const SaveItem& item, std::vector<SaveJob>& jobs) {
  const std::uint32_t job_start = item.first_token - item.first_token % block_tokens_;
  const std::uint32_t end = item.first_token + item.num_tokens;
  SaveJob job;
  job.request_id = request.id.value;
  const std::uint32_t window_end = window_end_of_chunk(request, end);
  for (std::size_t group = 0; group < request.blocks.size(); ++group)
    job.block_ids.push_back(blocks_of(request.blocks, group, job_start, end, window_end));
  job.items.push_back(item);
  job.items.back().first_token -= job_start;
  promise::saved_is_computed_alike(config_.only_reads, request.id.value);
  promise::saved_is_computed(job, job_start, request.computed, request.chain.size(), config_.groups, unit());
  jobs.push_back(std::move(job));
}

}  // namespace kvferry
