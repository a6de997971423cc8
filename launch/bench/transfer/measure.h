// Measures one engine, setting, path, kind of memory and shape, in each direction.
#pragma once

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

Measured measure(const Point& point, const TransferOptions& options, FarSide& far);

}  // namespace kvferry::bench
