// What stands in the event log: entries of records, each record a word of one node.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::controller::scale {

enum class LogKind : std::uint32_t {
  kHello = 1,  // `bytes`: wire::Hello; what follows is numbered from its next_sequence on
  kTold = 2,   // `bytes`: wire::Publish or wire::Evict
  kGone = 3,
  kHole = 4,  // of no node: words before it are missing
};

struct LogRecord {
  std::uint32_t kind = 0;
  std::string name_space{}, engine_id{};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;  // of kTold
  std::string bytes{};
  KVFERRY_FIELDS(kind, name_space, engine_id, incarnation, sequence, bytes);
};

/// A node numbers its words to each replica apart, so they count by the replica that wrote them down.
struct LogEntry {
  std::uint32_t version = 1;
  std::string writer{};  // name and run of a replica
  std::vector<LogRecord> records{};
  KVFERRY_FIELDS(version, writer, records);
};

}  // namespace kvferry::controller::scale
