// The identity of a node: what it registers with, and what messages, records and status reports carry.
#pragma once

#include <string>

#include "transport/base/ids.h"

namespace kvferry::controller {

/// To add a field, append it to KVFERRY_FIELDS of wire::Hello, NodeStatus (unless it is secret), NodeImage and
/// JoinedRecord: those formats grow only at their ends, so each lists the fields in the order in which it got them.
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
};

}  // namespace kvferry::controller
