#include "connector/runtime/worker/run_hasher.h"

#include <algorithm>
#include <utility>

#include "transport/base/checksum.h"

namespace kvferry {

void RunHasher::take(const std::string& sender, const Envelope& envelope, TimeNs now) {
  Result<ChecksumOrder> order = decode<ChecksumOrder>(envelope.body, "checksum order");
  if (!order || order->num_cells == 0) return;
  const TimeNs deadline = now + order->timeout_ms * kMillisecond;
  jobs_.push_back({std::move(*order), sender, 0, deadline});
}

bool RunHasher::step(ServerSocket& socket, TimeNs now) {
  std::erase_if(jobs_, [&](const Job& job) { return job.next >= job.order.items.size() || job.deadline <= now; });
  if (jobs_.empty()) return false;
  Job& job = jobs_.front();
  const ChecksumOutcome outcome = hash(job);
  ++job.next;
  socket.send(job.reply_to, seal(NodeMessage::kChecksumOutcome, job.order.order, outcome));
  return true;
}

ChecksumOutcome RunHasher::hash(const Job& job) const {
  const ChecksumOrder::Item& item = job.order.items[job.next];
  ChecksumOutcome outcome{job.order.order, job.order.rank, job.next, false, {}};
  const std::uint64_t bytes = item.num_tokens * bytes_per_token_;
  if (!is_readable_(item.chunk) || bytes > slot_bytes_) return outcome;
  const std::span<const std::byte> chunk = pool_.subspan(item.chunk.slot * slot_bytes_, bytes);
  const std::uint64_t cell_bytes = bytes / job.order.num_cells;
  // Each byte is hashed for its run first and for the whole right after, while it is in cache: what is damaged between
  // the two is noticed by the reader.
  ChecksumStream whole;
  std::uint64_t done = 0;
  for (const ShardRun& run : job.order.runs) {
    const std::uint64_t begin = run.source * cell_bytes, end = begin + run.cells * cell_bytes;
    if (end > bytes) return outcome;
    outcome.checksums.push_back(chunk_checksum(chunk.subspan(begin, end - begin)));
    if (end <= done) continue;
    whole.update(chunk.subspan(done, end - done));
    done = end;
  }
  whole.update(chunk.subspan(done));
  outcome.ok = whole.digest() == item.checksum && is_readable_(item.chunk);
  return outcome;
}

}  // namespace kvferry
