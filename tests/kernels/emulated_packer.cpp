#include "tests/kernels/emulated_packer.h"

#include <algorithm>

#include "kernels/chunk_shape.h"
#include "tests/kernels/emulated_launch.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using namespace device;

/// The block tables as a launch has them, with the job that points to them.
struct EmulatedJob {
  EmulatedJob(const TokenRun& run, std::byte* chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens) {
    std::size_t blocks = 0;
    for (const std::vector<BlockId>& table : run.block_ids) blocks = std::max(blocks, table.size());
    for (const std::vector<BlockId>& table : run.block_ids) {
      tables.insert(tables.end(), table.begin(), table.end());
      tables.resize(tables.size() + blocks - table.size(), kNoBlock);
    }
    job = {chunk,           tables.data(),  static_cast<std::uint32_t>(blocks),
           run.first_token, run.num_tokens, chunk_tokens,
           skip_tokens,     nullptr};
  }
  std::vector<BlockId> tables;
  PackJob job;
};

bool is_aligned(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address) % kVecBytes == 0; }

}  // namespace

Result<EmulatedPacker> EmulatedPacker::make(const KvLayout& layout, const ChunkFormat& format,
                                            std::uint32_t layers_at_once) {
  if (Result<void> ok = check_layout(layout); !ok) return std::move(ok).error();
  const Result<ChunkShape> shape = resolve(layout, format);
  if (!shape) return shape.error();
  return EmulatedPacker(layout, format, *shape, layers_at_once);
}

template <class Call>
void EmulatedPacker::for_each_launch(Call call) const {
  const std::uint32_t num_layers = host_plan_.plan.num_layers;
  for (std::uint32_t first = 0; first < num_layers; first += layers_at_once_)
    call(EmulatedLaunch{host_plan_.plan,
                        {first, std::min(first + layers_at_once_, num_layers)},
                        format_.cache_type,
                        format_.chunk_type,
                        secret_});
}

Result<std::uint64_t> EmulatedPacker::gather(const TokenRun& run, std::span<std::byte> chunk) const {
  if (Result<void> ok = check_gather(layout_, shape_, run, chunk.size()); !ok) return std::move(ok).error();
  const std::uint64_t num_bytes = run.num_tokens * shape_.bytes_per_token;
  std::vector<std::uint64_t> segments((num_bytes + kSegmentBytes - 1) / kSegmentBytes, 0);
  EmulatedJob made(run, chunk.data(), run.num_tokens, 0);
  made.job.segments = segments.data();
  const bool by_segments = is_vectorised() && is_aligned(chunk.data());
  for_each_launch([&](const EmulatedLaunch& launch) {
    if (by_segments)
      emulate_copy(launch, made.job, true, true);
    else
      emulate_elements(launch, made.job, true);
  });
  if (!by_segments) emulate_hash(secret_, chunk.data(), num_bytes, segments.data());
  return checksum_of_segments(segments, num_bytes);
}

Result<void> EmulatedPacker::scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens,
                                     std::uint32_t skip_tokens, const TokenRun& run) const {
  if (Result<void> ok = check_scatter(layout_, shape_, run, chunk.size(), chunk_tokens, skip_tokens); !ok) return ok;
  EmulatedJob made(run, const_cast<std::byte*>(chunk.data()), chunk_tokens, skip_tokens);
  const bool by_segments = is_vectorised() && is_aligned(chunk.data());
  for_each_launch([&](const EmulatedLaunch& launch) {
    if (by_segments)
      emulate_copy(launch, made.job, false, false);
    else
      emulate_elements(launch, made.job, false);
  });
  return {};
}

}  // namespace kvferry
