// Commands of operators to a controller: pin, move, evict or purge chunks, drain nodes, set quotas.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/chunk_key.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// PROTOCOL.md lists the verbs and the fields that each verb reads.
struct AdminCommand {
  std::string verb;  // pin, unpin, drain, undrain, move, clear, purge, quota
  std::string name_space{};
  std::string engine_id{};
  std::string other_engine_id{};
  std::string owner{};
  std::vector<ChunkKey> keys{};
  std::uint64_t ttl_ms = 0;
  std::uint64_t number = 0;
};
constexpr std::uint64_t kNoQuota = ~std::uint64_t{0};
/// Stands before the name of a member in AdminCommand::engine_id and PurgeChunks::giver.
inline constexpr std::string_view kMemberPrefix = "member:";

struct AdminResult {
  std::string text;  // the command's result as a sentence
  // Depends on the verb. pin and purge: id of the new pin or purge; quota: the new quota, or 0 if the quota was
  // removed; unpin and clear: number of nodes to which an order was addressed; move: number of chunks to move; drain
  // and undrain: 0.
  std::uint64_t number = 0;
};

/// Sends `command` to the controller at `endpoint`, whose cluster key is `key`, and waits for its answer, up to
/// `timeout_ms`. Threads: any. Errors: kInvalidArgument: `endpoint` is malformed, or is stream:// although there is a
/// key; kUnavailable: no answer came in time, or no connection can be opened; kRefused: the controller speaks another
/// protocol version or refused the command; the message has the reason; kCorrupt: the answer can't be read or is of
/// another kind.
Result<AdminResult> run_admin_command(const std::string& endpoint, const AdminCommand& command, std::int64_t timeout_ms,
                                      const std::optional<net::ClusterKey>& key = {});

}  // namespace kvferry::controller
