// The identity of a node: what it registers with, and what messages, records and status reports carry.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "transport/base/ids.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// What a node tells of itself for readers of the status, as printable texts. wire::Hello, NodeStatus, NodeImage and
/// JoinedRecord have it as one element, which grows only at its end. A new field is a member, the last one of
/// KVFERRY_FIELDS, and a row of kNodeDetails, by which it is checked and shown.
struct NodeDetails {
  std::string host{};  // name of the machine or pod on which the node runs
  KVFERRY_FIELDS(host);
};

struct NodeDetail {
  std::string_view name;  // key in JSON
  std::string NodeDetails::*text;
  std::size_t bytes_max;
};
inline constexpr NodeDetail kNodeDetails[] = {{"host", &NodeDetails::host, 256}};

/// The fields that came before NodeDetails, and those that no status may show.
struct NodeInfo {
  EngineId engine_id{};
  Incarnation incarnation{};
  std::string role{};         // vLLM's kv_role
  std::string endpoint{};     // where peers ask this node for leases, e.g. "tcp://10.0.0.7:41234"
  std::string name_space{};   // nodes of one namespace must have equal fingerprints
  std::string fingerprint{};  // text with model, KV dtype, layers, heads, head size, chunk_tokens, format version
  std::string serves{};       // URL under which routers reach this node's server; empty: not announced
  std::string version{};  // kvferry release; empty: the client fills in its own, or the node's release lacks the field
  // Random text of the node's process, without which a peer can't register as the same incarnation. No status shows it.
  // Empty: make_client() fills one in, or the node's release lacks the field.
  std::string secret{};
  NodeDetails details{};  // empty: the node's release lacks them
};

}  // namespace kvferry::controller
