// What the frames of the state folder hold: records of what a directory was told, of its nodes and of its chunks.
//
// A record is a byte of type, four of length, and so many more. Those of nodes are msgpack, which grows at its end;
// those of chunks are plain bytes, because there are millions. The first frame of a file has one record, its FileHead.
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

constexpr std::uint32_t kStateFormat = 1;  // raised by whatever an older release would read wrongly

/// A log goes on where the one with the number before ended, unless `begins_anew`: then something is missing between
/// them, which the snapshot of the same number has. A snapshot and the logs from its number on are the whole state.
struct FileHead {
  std::string kind;  // "log" or "snapshot"
  std::uint32_t format = kStateFormat;
  std::uint64_t number = 0;
  bool begins_anew = false;
  std::uint64_t index_version = 0;  // when it began
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
/// A snapshot without it was not finished.
void append_end(std::string& out);

/// nullopt: another record, or none.
std::optional<FileHead> head_in(std::string_view body);

/// Does to the directory what the records of a frame tell.
class Replayer {
 public:
  explicit Replayer(DirectoryState& state) : state_(state) {}
  /// False: malformed; what came before it is done.
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
