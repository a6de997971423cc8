// Which prefill and which decode node a prompt goes to: what they hold of it against how busy they are.
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

/// What a request in a node's queue costs the next one, in tokens to compute; what it costs to move a token's KV; up to
/// how many tokens a decode node computes by itself.
constexpr std::uint64_t kPrefillTokensPerRequest = 512;
constexpr std::uint64_t kDecodeTokensPerRequest = 128;
constexpr std::uint64_t kTokensMovedPerComputed = 4;
constexpr std::uint64_t kSkipTokensMax = 64;

struct PairNode {
  std::string engine_id, role, serves, endpoint;
  std::uint64_t load = 0;        // requests that it has, as it told
  TimeNs load_told_at = 0;       // another time: it counts what was chosen before
  std::uint64_t num_cached = 0;  // tokens of the prompt, from its begin
  bool is_leaving = false;
};

struct PairQuery {
  std::string name_space;
  std::uint64_t num_tokens = 0;
  std::set<std::string> exclude{};               // engine ids
  std::map<std::string, std::uint64_t> loads{};  // by engine id: what the asker knows to be there at least
};

struct Pair {
  std::size_t prefill = 0, decode = 0;  // of the nodes
  bool skip_prefill = false;            // the decode node computes what it lacks faster than another and a transfer
};

/// Counts what it chose until a node tells its load again, so that a burst between two heartbeats is shared.
/// Pure: time is in the nodes. Threads: one at a time.
class Pairing {
 public:
  /// kUnavailable: nobody is there for one of the two, in a sentence.
  Result<Pair> choose(const PairQuery& query, std::vector<PairNode>& nodes);

 private:
  struct Chosen {
    TimeNs load_told_at = 0;
    std::uint64_t num_requests = 0;
  };
  std::uint64_t load_of(const PairQuery& query, const PairNode& node);
  std::size_t best(const std::vector<std::pair<std::uint64_t, std::size_t>>& costs);
  void count(const PairQuery& query, const PairNode& node);

  std::map<std::pair<std::string, std::string>, Chosen> chosen_;  // by namespace and engine id
  std::uint64_t turn_ = 0;                                        // whose it is among equals
};

/// A prompt as the connector keys it.
struct PromptKeys {
  std::vector<ChunkKey> keys;         // of its full chunks
  std::vector<ChunkKey> tail_groups;  // of what could follow each; see LookupQuery
  ChunkKey rest_parent;               // of the tokens behind the last full chunk
};
PromptKeys keys_of_prompt(const ChunkKey& root, std::uint32_t chunk_tokens, std::span<const std::int32_t> tokens);

/// What changes all of a request's KV besides its tokens, as kvferry.scheduler_half spells it.
std::string request_extras(const std::string& lora_name, const std::string& lora_path, const std::string& cache_salt);

}  // namespace kvferry::controller
