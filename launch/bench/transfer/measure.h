// One engine, setting, path, kind of memory and shape, measured in each direction.
#pragma once

#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/options.h"
#include "launch/bench/transfer/rows.h"

namespace kvferry::bench {

/// An engine to measure on a path.
struct Contender {
  std::string engine;
  std::string setting;
  bool is_limit = false;  // a limit of the machine, neither kvferry nor a peer
  bool is_peer = false;
  bool is_free = false;  // not pinned, because the engine's own threads do the work
};

struct Measured {
  std::vector<Row> rows;
  std::string describe;
  std::uint64_t huge_page_bytes = 0;
};

/// `host`: this side's address on the route to the listener.
Result<Measured> measure(const Contender& contender, const std::string& path, MemoryKind memory, const Shape& shape,
                         const TransferOptions& options, LineLink& listener, const std::string& host,
                         bool is_same_host);

}  // namespace kvferry::bench
