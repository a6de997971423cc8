// One engine, setting, path, kind of memory and shape, measured in each direction.
#pragma once

#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/options.h"
#include "launch/bench/transfer/rows.h"

namespace kvferry::bench {

/// Who is to be measured on a path.
struct Contender {
  std::string engine;
  std::string setting;
  bool is_limit = false;  // of the machine: no row of it is kvferry's or a peer's
  bool is_peer = false;
  bool is_free = false;  // its own threads do the work: pinning the program's thread would harm it
};

struct Measured {
  std::vector<Row> rows;
  std::string describe;
  std::uint64_t huge_page_bytes = 0;
};

/// `host`: our address on the route to the listener.
Result<Measured> measure(const Contender& contender, const std::string& path, MemoryKind memory, const Shape& shape,
                         const TransferOptions& options, LineLink& listener, const std::string& host,
                         bool is_same_host);

}  // namespace kvferry::bench
