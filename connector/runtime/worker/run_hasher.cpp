#include "connector/runtime/worker/run_hasher.h"

#include <algorithm>
#include <utility>

#include "transport/base/checksum.h"
#include "transport/base/log.h"

namespace kvferry {

void RunHasher::start(ChecksumOrder order) {
  constexpr std::int64_t kTimeoutMaxMs = 60'000;
  const auto is_outside = [&](const ShardRun& run) {
    return run.cells > order.num_cells || run.source > order.num_cells - run.cells;
  };
  if (order.num_cells == 0 || order.timeout_ms > kTimeoutMaxMs || std::ranges::any_of(order.runs, is_outside)) {
    log().error(
        "refused an order to hash parts of chunks of {} cells (heads of a layer) within {} ms; allowed: at least 1 "
        "cell, parts inside a chunk, at most 60000 ms",
        order.num_cells, order.timeout_ms);
    return;
  }
  const TimeNs deadline = parts_.clock.now() + order.timeout_ms * kMillisecond;
  jobs_.push_back({std::move(order), deadline});
}

bool RunHasher::progress() {
  const TimeNs now = parts_.clock.now();
  std::erase_if(jobs_, [&](const Job& job) { return job.next >= job.order.items.size() || job.deadline <= now; });
  if (jobs_.empty()) return false;
  Job& job = jobs_.front();
  const ChecksumOutcome outcome = hash(job);
  ++job.next;
  send_(seal(job.order.order, outcome));
  return true;
}

ChecksumOutcome RunHasher::hash(const Job& job) const {
  const ChecksumOrder::Item& item = job.order.items[job.next];
  ChecksumOutcome outcome{job.order.order, job.order.rank, job.next, false, {}};
  const std::uint64_t bytes = item.num_tokens * parts_.bytes_per_token;
  if (!parts_.core.readable(item.chunk) || !parts_.fits(item.chunk, item.num_tokens)) return outcome;
  if (!parts_.divides(item.num_tokens, job.order.num_cells)) return outcome;
  const std::span<const std::byte> chunk = parts_.chunk_bytes(item.chunk, item.num_tokens);
  const std::uint64_t cell_bytes = bytes / job.order.num_cells;
  // The bytes of a run are hashed for the run, and right after that for the whole chunk, while they may still be in the
  // CPU cache.
  ChecksumStream whole;
  std::uint64_t done = 0;
  for (const ShardRun& run : job.order.runs) {
    const std::uint64_t begin = run.source * cell_bytes, end = begin + run.cells * cell_bytes;
    outcome.checksums.push_back(chunk_checksum(chunk.subspan(begin, end - begin)));
    if (end <= done) continue;
    whole.update(chunk.subspan(done, end - done));
    done = end;
  }
  whole.update(chunk.subspan(done));
  outcome.ok = whole.digest() == item.checksum && parts_.core.readable(item.chunk);
  return outcome;
}

}  // namespace kvferry
