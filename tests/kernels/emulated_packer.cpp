#include "tests/kernels/emulated_packer.h"

#include <algorithm>

#include "kernels/device/copy_elements.h"
#include "kernels/device/copy_segment.h"
#include "kernels/run_check.h"
#include "transport/base/checksum.h"

namespace kvferry {
namespace {

using namespace device;

/// The block tables as a launch has them, and the job that names them.
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

/// Calls call(Format{}, Element{}) for the format's types.
template <class Call>
void with_format(const ChunkFormat& format, Call call) {
  if (format.cache_type == format.chunk_type) return call(SameBytes{}, SameElement{});
  const auto with_cache = [&]<class Cache>(Cache) {
    if (format.chunk_type == ElementType::kE4m3)
      call(Converted<Cache, E4m3>{}, ConvertedElement<Cache, E4m3>{});
    else
      call(Converted<Cache, E5m2>{}, ConvertedElement<Cache, E5m2>{});
  };
  if (format.cache_type == ElementType::kBf16) return with_cache(Bf16{});
  if (format.cache_type == ElementType::kFp16) return with_cache(Fp16{});
  with_cache(Fp32{});
}

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
    call(LayerRange{first, std::min(first + layers_at_once_, num_layers)});
}

Result<std::uint64_t> EmulatedPacker::gather(const TokenRun& run, std::span<std::byte> chunk) const {
  if (Result<void> ok = check_gather(layout_, shape_, run, chunk.size()); !ok) return std::move(ok).error();
  const std::uint64_t num_bytes = run.num_tokens * shape_.bytes_per_token;
  std::vector<std::uint64_t> segments((num_bytes + kSegmentBytes - 1) / kSegmentBytes, 0);
  EmulatedJob made(run, chunk.data(), run.num_tokens, 0);
  const PackPlan& plan = host_plan_.plan;
  const bool by_segments = is_vectorised() && is_aligned(chunk.data());
  for_each_launch([&](LayerRange layers) {
    if (run.num_tokens == 0) return;
    with_format(format_, [&]<class Format, class Element>(Format, Element) {
      const std::uint64_t layer_bytes = plan.layer_bytes(run.num_tokens);
      if (!by_segments) {
        const std::uint64_t end = layers.end * layer_bytes / plan.chunk_element_bytes;
        for (std::uint64_t i = layers.first * layer_bytes / plan.chunk_element_bytes; i < end; ++i)
          copy_element<Element, true>(plan, made.job, i);
        return;
      }
      const std::uint64_t end = (layers.end * layer_bytes + kSegment - 1) / kSegment;
      for (std::uint64_t segment = layers.first * layer_bytes / kSegment; segment < end; ++segment) {
        std::uint64_t sum = 0;
        bool is_whole = false;
        for (std::uint32_t lane = 0; lane < kHashLanes; ++lane) {
          const LanePart part = gather_segment<Format, true>(plan, made.job, layers, secret_, segment, lane);
          sum += part.part;
          is_whole = part.is_whole;
        }
        if (is_whole) segments[segment] = SegmentLane::finish(sum);
      }
    });
  });
  if (!by_segments) {
    for (std::uint64_t segment = 0; segment < segments.size(); ++segment) {
      std::uint64_t sum = 0;
      for (std::uint32_t lane = 0; lane < kHashLanes; ++lane)
        sum += hash_segment(chunk.data(), num_bytes, secret_, segment, lane);
      segments[segment] = SegmentLane::finish(sum);
    }
  }
  return checksum_of_segments(segments, num_bytes);
}

Result<void> EmulatedPacker::scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens,
                                     std::uint32_t skip_tokens, const TokenRun& run) const {
  if (Result<void> ok = check_scatter(layout_, shape_, run, chunk.size(), chunk_tokens, skip_tokens); !ok) return ok;
  EmulatedJob made(run, const_cast<std::byte*>(chunk.data()), chunk_tokens, skip_tokens);
  const PackPlan& plan = host_plan_.plan;
  const bool by_segments = is_vectorised() && is_aligned(chunk.data());
  for_each_launch([&](LayerRange layers) {
    if (run.num_tokens == 0) return;
    with_format(format_, [&]<class Format, class Element>(Format, Element) {
      const std::uint64_t layer_bytes = plan.layer_bytes(run.num_tokens);
      if (!by_segments) {
        const std::uint64_t end = layers.end * layer_bytes / plan.chunk_element_bytes;
        for (std::uint64_t i = layers.first * layer_bytes / plan.chunk_element_bytes; i < end; ++i)
          copy_element<Element, false>(plan, made.job, i);
        return;
      }
      const std::uint64_t end = (layers.end * layer_bytes + kSegment - 1) / kSegment;
      for (std::uint64_t segment = layers.first * layer_bytes / kSegment; segment < end; ++segment)
        for (std::uint32_t lane = 0; lane < kHashLanes; ++lane)
          scatter_segment<Format, false>(plan, made.job, layers, secret_, segment, lane);
    });
  });
  return {};
}

}  // namespace kvferry
