// Converts the scheduler node's reports for Python: changes of its pool for kvferry/pool_events.py, ended transfers for
// kvferry/ended_transfers.py.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "connector/runtime/scheduler/scheduler_node.h"

namespace kvferry {

inline nanobind::bytes key_bytes(const ChunkKey& key) { return nanobind::bytes(key.bytes.data(), key.bytes.size()); }

/// Returns the fields of PoolChanges: is_all and, for each chunk, key, is_ready and is_writing.
inline std::pair<bool, std::vector<std::tuple<nanobind::bytes, bool, bool>>> pool_changes(SchedulerNode& node) {
  const PoolChanges changes = node.take_pool_changes();
  std::vector<std::tuple<nanobind::bytes, bool, bool>> chunks;
  for (const PoolChange& chunk : changes.chunks)
    chunks.emplace_back(key_bytes(chunk.key), chunk.is_ready, chunk.is_writing);
  return {changes.is_all, std::move(chunks)};
}

/// Returns request_id, key, first_token and num_tokens of each NamedChunk.
inline std::vector<std::tuple<std::string, nanobind::bytes, std::uint32_t, std::uint32_t>> named_chunks(
    SchedulerNode& node) {
  std::vector<std::tuple<std::string, nanobind::bytes, std::uint32_t, std::uint32_t>> chunks;
  for (NamedChunk& chunk : node.take_named_chunks())
    chunks.emplace_back(std::move(chunk.request_id), key_bytes(chunk.key), chunk.first_token, chunk.num_tokens);
  return chunks;
}

using PyTransfer = std::tuple<std::string, std::string, TimeNs, TimeNs, std::uint32_t, std::uint32_t, std::uint64_t,
                              std::string, std::string, std::tuple<TimeNs, TimeNs, TimeNs>>;

/// Returns SchedulerNode::transfers_after(). The fields of a transfer are those of EndedTransfer in
/// kvferry/ended_transfers.py.
inline std::pair<std::uint64_t, std::vector<PyTransfer>> transfers(SchedulerNode& node, std::uint64_t number) {
  auto [last, lives] = node.transfers_after(number);
  std::vector<PyTransfer> transfers;
  for (RequestLife& life : lives) {
    const LifeEvent& event = life.events[0];
    const bool is_load = event.what() == LifeKind::kLoaded;
    const std::string_view kind = is_load ? "load" : event.what() == LifeKind::kPulled ? "pull" : "push";
    const bool is_ok = event.why() == Cause::kNone && event.failed == 0;
    transfers.emplace_back(std::move(life.request), kind, event.at, event.duration,
                           is_load ? event.loaded : event.tokens, event.chunks, event.bytes, event.path.view(),
                           is_ok ? "ok" : kCauseNames[event.cause], std::tuple(event.post, event.wire, event.unpack));
  }
  return {last, std::move(transfers)};
}

}  // namespace kvferry
