// The identity of a node, which registrations, messages, records and status reports contain.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "transport/base/ids.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// Printable texts about a node, which the status shows. wire::Hello, NodeStatus, NodeImage and JoinedRecord contain
/// them as one element. To add a field, append it to the members and to KVFERRY_FIELDS, and add a row to kNodeDetails,
/// which tells other code which fields to check and show.
struct NodeDetails {
  std::string host{};    // name of the machine or pod on which the node runs
  std::string member{};  // name of the member whose key the node used, set by the controller; empty: no member's key
  // Longest prompt, in tokens, of which a proxy may send the node a preparation (see connector/DESIGN.md); empty: none.
  std::string prepared_tokens_max{};
  std::string conversion{};  // how the node converts chunks that it loads, e.g. "bfloat16 to fp8"; empty: not at all
  KVFERRY_FIELDS(host, member, prepared_tokens_max, conversion);
};

struct NodeDetail {
  std::string_view name;  // field name in the status's JSON
  std::string NodeDetails::*text;
  std::size_t bytes_max;
};
inline constexpr NodeDetail kNodeDetails[] = {{"host", &NodeDetails::host, 256},
                                              {"member", &NodeDetails::member, 63},
                                              {"prepared_tokens_max", &NodeDetails::prepared_tokens_max, 20},
                                              {"conversion", &NodeDetails::conversion, 63}};

/// Identity and addresses of a node. Add new fields to NodeDetails instead, except fields that no status may show.
struct NodeInfo {
  EngineId engine_id{};
  Incarnation incarnation{};
  std::string role{};         // vLLM's kv_role: kv_producer (prefill), kv_consumer (decode) or kv_both
  std::string endpoint{};     // where peers ask this node for leases, e.g. "tcp://10.0.0.7:41234"
  std::string name_space{};   // nodes of one namespace must have equal fingerprints
  std::string fingerprint{};  // text about model, KV format and chunk size, see transport/base/fingerprint.h
  std::string serves{};       // URL under which routers reach this node's server; empty: not announced
  // kvferry release. Empty before the client sets it, and for a node whose release does not send it.
  std::string version{};
  // Random text that proves the node's identity: while the node is registered, a process that does not know the text
  // can't register as the same incarnation. No status shows the text. The text is empty before make_client() sets it,
  // and for a node whose release does not send it.
  std::string secret{};
  NodeDetails details{};  // empty if the node's release does not send details
};

}  // namespace kvferry::controller
