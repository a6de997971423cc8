// The records in the batches of the state folder: changes of a directory, its nodes and its chunks.
//
// A record has a type (1 byte), a length (4 bytes), and that many bytes. The FileHead and records with nodes'
// registrations are msgpack, so that later releases can append fields; records of chunks are plain bytes, because there
// are millions of chunks. The first record of a file is its FileHead.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "controller/directory/directory_state.h"
#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

constexpr std::uint32_t kStateFormat = 1;  // must be raised with each change that an older release would misread

/// A log continues the log with the next lower number. If `begins_anew` is set, changes between the two logs are
/// missing; only the snapshot with this log's number has them. A snapshot and all logs whose number is not lower than
/// the snapshot's contain the whole state.
struct FileHead {
  std::string kind;  // "log" or "snapshot"
  std::uint32_t format = kStateFormat;
  std::uint64_t number = 0;
  bool begins_anew = false;
  std::uint64_t index_version = 0;  // the directory's index version when the file was begun
  KVFERRY_FIELDS(kind, format, number, begins_anew, index_version);
};

void append_head(std::string& out, const FileHead& head);
void append_joined(std::string& out, NodeId node, const NodeInfo& info, std::uint64_t next_sequence);
void append_gone(std::string& out, NodeId node);
void append_published(std::string& out, NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                      std::span<const ChunkEntry> chunks, bool is_partial);
void append_evicted(std::string& out, NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys);
void append_snapshot_dropped(std::string& out, NodeId node);
void append_image(std::string& out, const DirectoryImage& image);
void append_block(std::string& out, const std::string& name_space, const TableBlock& block);
/// Appends the record that marks the end of a snapshot. A snapshot without this record is incomplete.
void append_end(std::string& out);

/// Returns nullopt if `body` does not begin with a FileHead.
std::optional<FileHead> head_in(std::string_view body);

/// Applies the records of batches to a directory.
class Replayer {
 public:
  explicit Replayer(DirectoryState& state) : state_(state) {}
  /// Returns false at a malformed record, after applying those before it.
  bool replay(std::string_view body);
  std::uint64_t num_records() const { return num_records_; }
  bool has_end() const { return has_end_; }

 private:
  bool replay(std::uint8_t type, std::string_view record);
  DirectoryState& state_;
  TableBlock block_;
  std::vector<ChunkEntry> chunks_;
  std::vector<ChunkKey> keys_;
  std::uint64_t num_records_ = 0;
  bool has_end_ = false;
};

}  // namespace kvferry::controller
