// Chooses a prefill and a decode node for a prompt, by the cached tokens and the load of each node.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/chunk_key.h"
#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::controller {

// Costs of a pair of nodes, in units of the time to compute one token.
constexpr std::uint64_t kPrefillTokensPerRequest = 512;  // delay caused by each request on a prefill node
constexpr std::uint64_t kDecodeTokensPerRequest = 128;   // delay caused by each request on a decode node
// Number of tokens whose KV is transferred in the time to compute one token.
constexpr std::uint64_t kTokensMovedPerComputed = 4;
// A decode node that has cached tokens of the prompt computes up to this many missing tokens itself.
constexpr std::uint64_t kSkipTokensMax = 64;

struct PairNode {
  std::string engine_id, role, serves, endpoint;
  std::uint64_t load = 0;        // number of requests on the node, as the node reported it
  TimeNs load_reported_at = 0;   // time of the report of `load`, which is assumed to count all requests assigned before
  std::uint64_t num_cached = 0;  // length of the prompt's cached prefix, in tokens
  bool is_leaving = false;
};

struct PairQuery {
  std::string name_space;
  std::uint64_t num_tokens = 0;
  std::set<std::string> exclude{};               // engine ids of nodes that must not be chosen
  std::map<std::string, std::uint64_t> loads{};  // [engine id] lower bound on the node's load, known to the caller
};

struct Pair {
  std::size_t prefill = 0, decode = 0;  // indexes into the `nodes` of choose()
  bool skip_prefill = false;            // the decode node computes the missing tokens itself
};

/// Chooses nodes for requests. A request counts as load of each of its nodes from the choice until that node reports
/// its load again, so that a burst of requests between two heartbeats is spread over the nodes. Pure: the only times
/// are those in PairNode. Threads: one at a time.
class Pairing {
 public:
  /// kUnavailable: there is no prefill or no decode node; the error message has the reasons.
  Result<Pair> choose(const PairQuery& query, std::vector<PairNode>& nodes);

 private:
  struct Chosen {
    TimeNs load_reported_at = 0;
    std::uint64_t num_requests = 0;
  };
  std::uint64_t load_of(const PairQuery& query, const PairNode& node);
  std::size_t best(const std::vector<std::pair<std::uint64_t, std::size_t>>& costs);
  void count(const PairQuery& query, const PairNode& node);

  // [namespace, engine id] requests that were assigned since the node's last report
  std::map<std::pair<std::string, std::string>, Chosen> chosen_;
  std::uint64_t turn_ = 0;  // rotates the choice among nodes of equal cost
};

/// Keys of a prompt without images, as the connector computes them.
struct PromptKeys {
  std::vector<ChunkKey> keys;         // keys of full chunks
  std::vector<ChunkKey> tail_groups;  // [i] group of a tail after i full chunks, as in LookupQuery
  ChunkKey rest_parent;               // key of the last full chunk, or the root key if there is no full chunk
};
PromptKeys keys_of_prompt(const ChunkKey& root, std::uint32_t chunk_tokens, std::span<const std::int32_t> tokens);

/// Returns the extras of a request, on which its KV depends besides the tokens, spelled as in the connector
/// (kvferry/request_extras.py). `weights_epoch`: as in NodeReport. The connector's extras also have a digest of the
/// LoRA's files, which the controller does not know, so with a LoRA no node's keys match.
std::string request_extras(const std::string& lora_name, const std::string& lora_path, const std::string& weights_epoch,
                           const std::string& cache_salt);

}  // namespace kvferry::controller
