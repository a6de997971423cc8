// Measures engines and settings on one path, with one kind of memory and shape, in each direction.
#pragma once

#include <span>

#include "launch/bench/transfer/far_side.h"
#include "launch/bench/transfer/options.h"
#include "launch/bench/transfer/rows.h"

namespace kvferry::bench {

/// An engine to measure on a path.
struct Contender {
  std::string engine;
  std::string setting;
  bool is_limit = false;  // true: this engine measures a limit of the machine; it is neither kvferry nor a peer
  bool is_peer = false;
  bool is_free = false;  // true: the worker is not pinned to a core, because the engine's own threads do the work
};

struct Point {
  std::string path;
  MemoryKind memory;
  Shape shape;
  Contender contender;
};

struct Measured {
  std::vector<Row> rows;
  std::string describe;
  std::uint64_t huge_page_bytes = 0;
};

/// Measures points that differ in their contender only, and returns what was measured of each. Several contenders take
/// turns: each moves all blocks once before one of them moves them again, so that other load on the machine is the same
/// for all.
std::vector<Measured> measure(std::span<const Point> points, const TransferOptions& options, FarSide& far);

}  // namespace kvferry::bench
