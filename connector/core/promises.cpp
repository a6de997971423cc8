#include "connector/core/promises.h"

namespace kvferry::promise {

void exact_load(const LoadJob& job, std::uint32_t first_token, std::uint32_t n, std::span<const KvGroup> groups,
                std::span<const std::uint32_t> needed_from, std::uint32_t unit) {
  std::uint32_t next = first_token;
  for (const LoadItem& item : job.items) {
    KVFERRY_CHECK(
        item.first_token == next && item.num_tokens > 0 && item.skip_tokens + item.num_tokens <= item.chunk_tokens,
        "exact-load: request {} loads {} tokens at token {} of its blocks, from token {} of a chunk of {} tokens; it "
        "must load at least 1, begin at token {} of its blocks, and end within the chunk",
        job.request_id, item.num_tokens, item.first_token, item.skip_tokens, item.chunk_tokens, next);
    next += item.num_tokens;
  }
  KVFERRY_CHECK(next - first_token == n,
                "exact-load: request {} was allocated {} external tokens, but the plan loads {}", job.request_id, n,
                next - first_token);
  KVFERRY_CHECK(first_token % unit == 0 && next % unit == 0,
                "exact-load: request {} loads tokens {} to {} of its blocks; both must be multiples of {}",
                job.request_id, first_token, next, unit);
  KVFERRY_CHECK(job.block_ids.size() == groups.size() && groups.size() == needed_from.size(),
                "exact-load: request {} has blocks of {} KV groups, but the engine has {} groups", job.request_id,
                job.block_ids.size(), groups.size());
  for (std::size_t group = 0; group < job.block_ids.size(); ++group) {
    const std::vector<BlockId>& blocks = job.block_ids[group];
    const std::uint32_t block_tokens = groups[group].block_tokens;
    KVFERRY_CHECK(std::uint64_t{blocks.size()} * block_tokens >= next,
                  "exact-load: request {} has {} blocks of {} tokens in KV group {}, too few for {} tokens",
                  job.request_id, blocks.size(), block_tokens, group, next);
    for (std::size_t i = needed_from[group] / block_tokens; i < blocks.size(); ++i)
      KVFERRY_CHECK(blocks[i] != kNoBlock,
                    "exact-load: request {} has no block {} in KV group {}, into which it loads KV", job.request_id, i,
                    group);
  }
}

void saved_is_computed(const SaveJob& job, std::uint32_t job_start, std::uint32_t computed, std::uint32_t known,
                       std::span<const KvGroup> groups, std::uint32_t unit) {
  for (const SaveItem& item : job.items) {
    const std::uint64_t end_in_job = std::uint64_t{item.first_token} + item.num_tokens;
    const std::uint64_t end = std::uint64_t{job_start} + end_in_job;
    KVFERRY_CHECK(item.num_tokens > 0 && end <= computed && end <= known,
                  "saved-is-computed: request {} saves {} tokens up to token {}; allowed: at least 1, up to token {} "
                  "(computed) and token {} (known)",
                  job.request_id, item.num_tokens, end, computed, known);
    KVFERRY_CHECK(item.first_token % unit == 0 && end_in_job % unit == 0,
                  "saved-is-computed: request {} saves tokens {} to {} of its blocks; both must be multiples of {}",
                  job.request_id, item.first_token, end_in_job, unit);
    for (std::size_t group = 0; group < job.block_ids.size(); ++group) {
      const std::vector<BlockId>& blocks = job.block_ids[group];
      KVFERRY_CHECK(std::uint64_t{blocks.size()} * groups[group].block_tokens >= end_in_job,
                    "saved-is-computed: request {} has {} blocks of {} tokens in KV group {}, too few for {} tokens",
                    job.request_id, blocks.size(), groups[group].block_tokens, group, end_in_job);
    }
  }
}

}  // namespace kvferry::promise
