// Gather and scatter for large runs: in each plane (kv_layout.h), both copy all heads of a block before the next block,
// while a chunk has all tokens of a head before the next head. Most of their stores bypass the CPU caches. Private to
// this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/chunk_shape.h"
#include "kernels/copy_rows.h"
#include "kernels/packer.h"
#include "kernels/segment_hashes.h"

namespace kvferry {

/// A view of a host packer's layout, element types, shape and planes. Owns nothing.
struct HostStream {
  const KvLayout& layout;
  ElementType cache_type, chunk_type;
  const ChunkShape& shape;
  std::span<const PlanePlan> planes;

  /// Returns true if this class suits the run: the run is large enough, and a head's rows in a block fit a small
  /// buffer. For a gather, the run must also consist of whole blocks, in each of which a head's rows are whole checksum
  /// segments.
  bool suits_gather(const TokenRun& run) const;
  bool suits_scatter(const TokenRun& run) const;
  /// gather() and scatter() do the same as Packer's functions with these names, but the arguments must have passed the
  /// checks in chunk_shape.h, and suits_gather() or suits_scatter() must have returned true. gather() returns the
  /// hashes of the chunk's segments (checksum.h).
  std::vector<std::uint64_t> gather(const TokenRun& run, std::byte* chunk) const;
  /// Also adds the copied rows to `hashes`, unless `hashes` is nullptr.
  void scatter(const std::byte* chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens, const TokenRun& run,
               SegmentHashes* hashes) const;

 private:
  struct Piece;
  template <class Visit>
  void for_each_piece(const TokenRun& run, Visit visit) const;
  bool is_plain(const PlanePlan& plane) const;
  const std::byte* collect(const Piece& piece, std::byte* stage) const;
  void put(const Piece& piece, const std::byte* rows, std::byte* stage) const;

  bool is_worth_it(const TokenRun& run) const;
  std::size_t row_bytes() const { return std::size_t{layout.head_dim} * shape.chunk_element_bytes; }
  std::size_t cache_row_bytes() const { return std::size_t{layout.head_dim} * layout.element_bytes; }
};

}  // namespace kvferry
