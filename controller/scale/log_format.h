// The format of the event log: entries of records; a record is one message or event of one node.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/base/wire.h"

namespace kvferry::controller::scale {

enum class LogKind : std::uint32_t {
  kHello = 1,   // `bytes`: wire::Hello; later messages count from its next_sequence
  kUpdate = 2,  // `bytes`: wire::Publish or wire::Evict
  kGone = 3,
  kHole = 4,  // has no node; records before it are missing
};

struct LogRecord {
  std::uint32_t kind = 0;
  std::string name_space{}, engine_id{};
  std::uint64_t incarnation = 0;
  std::uint64_t sequence = 0;  // used by kUpdate
  std::string bytes{};
  KVFERRY_FIELDS(kind, name_space, engine_id, incarnation, sequence, bytes);
};

/// A node numbers its messages to each replica separately, so a sequence number belongs to the writer of the entry.
struct LogEntry {
  std::uint32_t version = 1;
  std::string writer{};  // name and run of a replica
  std::vector<LogRecord> records{};
  KVFERRY_FIELDS(version, writer, records);
};

}  // namespace kvferry::controller::scale
