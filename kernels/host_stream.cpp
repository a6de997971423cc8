#include "kernels/host_stream.h"

#include <algorithm>
#include <vector>

#include "kernels/convert_rows.h"
#include "transport/base/checksum.h"
#include "transport/base/memory/large_memory.h"

namespace kvferry {
namespace {

constexpr std::size_t kStreamBytesMin = 4 << 20;
constexpr std::size_t kStageBytes = 16 << 10;  // size of a buffer for rows, which fits the first-level cache

}  // namespace

/// The tokens of one head in one block.
struct HostStream::Piece {
  const PlanePlan& plane;
  std::size_t canonical_row = 0;  // index of (layer, copied head, K or V) in the order of a chunk
  std::uint32_t first = 0;        // index of the first token in the run
  std::uint32_t tokens = 0;
  std::byte* cache = nullptr;  // address of the first element; nullptr if the block is kNoBlock
  // Address from which to prefetch as many bytes as this piece has; nullptr: prefetch nothing.
  const std::byte* ahead = nullptr;
};

bool HostStream::is_worth_it(const TokenRun& run) const {
  return run.num_tokens * shape.bytes_per_token >= kStreamBytesMin &&
         layout.block_tokens * std::max(row_bytes(), cache_row_bytes()) <= kStageBytes;
}

bool HostStream::suits_gather(const TokenRun& run) const {
  return is_worth_it(run) && layout.block_tokens * row_bytes() % kSegmentBytes == 0 &&
         run.num_tokens % layout.block_tokens == 0 && run.first_token % layout.block_tokens == 0;
}

bool HostStream::suits_scatter(const TokenRun& run) const { return is_worth_it(run); }

template <class Visit>
void HostStream::for_each_piece(const TokenRun& run, Visit visit) const {
  const std::uint32_t end = run.first_token + run.num_tokens;
  for (std::size_t index = 0; index < planes.size(); ++index) {
    const PlanePlan& plane = planes[index];
    const std::vector<BlockId>& table = run.block_ids[plane.group];
    const auto address_of = [&](std::uint32_t token, std::uint32_t head) -> std::byte* {
      const BlockId block = table[token / layout.block_tokens];
      if (block == kNoBlock) return nullptr;
      const std::int64_t offset = block * plane.strides.block_stride_bytes +
                                  (shape.first_in_cache + head) * plane.strides.head_stride_bytes +
                                  token % layout.block_tokens * plane.strides.token_stride_bytes;
      return reinterpret_cast<std::byte*>(plane.strides.base + static_cast<std::uint64_t>(offset));
    };
    const std::size_t first_row = index / layout.planes * shape.num_heads * layout.planes + index % layout.planes;
    for (std::uint32_t token = run.first_token; token < end;) {
      const std::uint32_t tokens = std::min(end - token, layout.block_tokens - token % layout.block_tokens);
      const std::uint32_t next = token + tokens;
      // A gather prefetches the next block from front to back, whether its heads are contiguous or interleaved.
      const std::byte* const next_block = next < end ? address_of(next, 0) : nullptr;
      for (std::uint32_t head = 0; head < shape.num_heads; ++head) {
        const std::byte* const ahead =
            next_block == nullptr ? nullptr : next_block + std::size_t{head} * tokens * cache_row_bytes();
        visit(Piece{plane, first_row + head * layout.planes, token - run.first_token, tokens, address_of(token, head),
                    ahead});
      }
      token = next;
    }
  }
}

bool HostStream::is_plain(const PlanePlan& plane) const {
  return !shape.converts && plane.gather == CopyRows{copy_run<CopyDirection::kGather>};
}

/// Returns the address of the piece's rows as a chunk has them: in the cache if the bytes are the same there, otherwise
/// in `stage`, where this function builds the rows.
const std::byte* HostStream::collect(const Piece& piece, std::byte* stage) const {
  const PlaneLayout& strides = piece.plane.strides;
  if (piece.cache == nullptr) {
    copy_nothing<CopyDirection::kGather>(stage, piece.tokens * row_bytes());
    return stage;
  }
  if (is_plain(piece.plane)) return piece.cache;
  if (!shape.converts && piece.plane.gather != CopyRows{copy_each_row<CopyDirection::kGather>}) {
    piece.plane.gather(strides, piece.cache, stage, piece.tokens, row_bytes(), layout.element_bytes);
    return stage;
  }
  std::byte* cache = piece.cache;
  for (std::uint32_t t = 0; t < piece.tokens; ++t, cache += strides.token_stride_bytes) {
    if (shape.converts)
      convert_to_chunk(cache_type, chunk_type, cache, strides.dim_stride_bytes, stage + t * row_bytes(),
                       layout.head_dim, 1 / piece.plane.scale);
    else
      std::memcpy(stage + t * row_bytes(), cache, row_bytes());
  }
  return stage;
}

std::vector<std::uint64_t> HostStream::gather(const TokenRun& run, std::byte* chunk) const {
  alignas(64) std::byte stage[kStageBytes];
  std::vector<std::uint64_t> segments(run.num_tokens * shape.bytes_per_token / kSegmentBytes);
  const std::size_t head_bytes = run.num_tokens * row_bytes();
  for_each_piece(run, [&](const Piece& piece) {
    const std::size_t at = piece.canonical_row * head_bytes + piece.first * row_bytes();
    const std::size_t bytes = piece.tokens * row_bytes();
    const std::byte* const rows = collect(piece, stage);
    stream_copy(chunk + at, rows, bytes, piece.ahead);
    for (std::size_t byte = 0; byte < bytes; byte += kSegmentBytes)  // hashes the rows while the CPU cache has them
      segments[(at + byte) / kSegmentBytes] =
          segment_checksum(std::span<const std::byte, kSegmentBytes>(rows + byte, kSegmentBytes));
  });
  finish_streams();
  return segments;
}

void HostStream::put(const Piece& piece, const std::byte* rows, std::byte* stage) const {
  const PlanePlan& plane = piece.plane;
  const PlaneLayout& strides = plane.strides;
  if (shape.converts) {
    for (std::uint32_t t = 0; t < piece.tokens; ++t)
      convert_to_cache(cache_type, chunk_type, stage + t * cache_row_bytes(), layout.element_bytes,
                       rows + t * row_bytes(), layout.head_dim, plane.scale);
    rows = stage;
  }
  if (plane.scatter == CopyRows{copy_run<CopyDirection::kScatter>})
    return stream_copy(piece.cache, rows, piece.tokens * cache_row_bytes());
  if (plane.scatter == CopyRows{copy_each_row<CopyDirection::kScatter>}) {
    for (std::uint32_t t = 0; t < piece.tokens; ++t)
      stream_copy(piece.cache + t * strides.token_stride_bytes, rows + t * cache_row_bytes(), cache_row_bytes());
    return;
  }
  // CopyRows has one signature for both directions; functions that scatter only read through this pointer.
  plane.scatter(strides, piece.cache, const_cast<std::byte*>(rows), piece.tokens, cache_row_bytes(),
                layout.element_bytes);
}

void HostStream::scatter(const std::byte* chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                         const TokenRun& run, SegmentHashes* hashes) const {
  alignas(64) std::byte stage[kStageBytes];
  const std::size_t head_bytes = chunk_tokens * row_bytes();
  const std::size_t rows_of_layer = std::size_t{shape.num_heads} * layout.planes;
  for_each_piece(run, [&](const Piece& piece) {
    if (piece.cache == nullptr) return;
    const std::size_t skipped_heads =
        piece.canonical_row / rows_of_layer * (shape.chunk_heads - shape.num_heads) + shape.first_in_chunk;
    const std::size_t row = piece.canonical_row + skipped_heads * layout.planes;
    const std::byte* const rows = chunk + row * head_bytes + (skip_tokens + piece.first) * row_bytes();
    expect(rows + layout.planes * head_bytes, 8 * 64);  // prefetches the start of these tokens' rows for the next head
    // The rows are hashed before put(), so that put() finds them in the CPU cache.
    if (hashes != nullptr) hashes->add({rows, piece.tokens * row_bytes()});
    put(piece, rows, stage);
  });
  finish_streams();
}

}  // namespace kvferry
