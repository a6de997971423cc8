// The engines registered with their KV event endpoints: their properties, their blocks, and how much of a prompt each
// one has cached. Pure: the caller passes the time. The sockets are in engine_events_listener.h, the HTTP requests in
// http/http_engines.cpp.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "controller/engines/engine_index.h"
#include "controller/engines/engine_stream.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct EngineInfo {
  std::string instance_id;  // name by which routers know the engine
  std::string model;
  std::string tenant = "default";
  std::string salt;                      // engines of one model share blocks only if their salts are equal
  std::string lora_name;                 // LoRA adapter assumed for events that name none
  std::string kind;                      // the engine's program, such as vLLM or SGLang; only displayed
  std::string endpoint;                  // address of the engine's event publisher
  std::string replay_endpoint;           // address of the engine's replay socket; may be empty
  std::uint32_t block_size = 0;          // number of tokens in a block
  std::optional<std::uint32_t> dp_rank;  // data-parallel rank; none: the rank that each batch names, or 0
};

using EngineNumber = std::uint32_t;  // number of a registration; never reused

struct EngineBatchCounters {
  std::uint64_t events = 0;
  std::uint64_t events_unknown = 0;
  std::uint64_t events_malformed = 0;
  std::uint64_t batches_malformed = 0;
  std::uint64_t clears = 0;  // number of events that reported that the engine cleared its cache
};

struct EngineStatus {
  EngineInfo info;
  bool is_live = false, is_connected = false, is_confirmed = false;
  TimeNs silent_for = 0;
  EngineStreamCounters stream;
  EngineBatchCounters batches;
  std::map<std::uint32_t, std::array<std::size_t, kNumTiers>> blocks;  // number of blocks by rank and tier
};

struct NamespaceStatus {
  std::string model, tenant, salt;
  std::uint32_t block_size = 0;
  std::size_t num_blocks = 0, num_hashes = 0;
  EngineIndexCounters counters;
};

/// How much of a prompt one rank has, in tokens; see EngineMatch.
struct RankMatch {
  std::string instance_id;
  std::uint32_t block_size = 0;
  std::uint32_t rank = 0;
  std::uint32_t in_tier[kNumTiers] = {};
  std::uint32_t up_to_tier[kNumTiers] = {};
  bool confirmed = true;  // false: batches may be missing, and no replay has delivered them yet
};

struct PromptQuery {
  std::string model;
  std::string tenant = "default";
  std::string salt;                         // the engines' salt, or the request's cache salt if no engine has this salt
  std::optional<std::uint32_t> block_size;  // number of tokens in a block; none: engines of any block size match
  std::string lora_name;
  std::optional<std::uint64_t> lora_id;
  std::optional<std::string> instance_id;  // the only instance that matches; none: all instances match
  std::vector<std::uint32_t> tokens;       // tokens of the prompt; unused if `hashes` are given
  std::vector<ShortKey> hashes;
};

/// The registered engines and the blocks that each of them holds. Threads: one at a time.
class EngineDirectory {
 public:
  /// `options.block_size` is ignored, because each engine registers its own block size.
  explicit EngineDirectory(const EngineIndexOptions& options);
  ~EngineDirectory();

  struct Added {
    EngineNumber id;
    std::optional<EngineNumber> replaced;  // removed engine with the same instance, model, tenant and rank
    bool is_known = false;                 // an identical engine was registered before; `id` is its number
  };
  /// Registers an engine. kFull: the limit on registered engines is reached.
  Result<Added> add(const EngineInfo& info, TimeNs now);
  void remove(EngineNumber id);
  /// Returns the engines of an instance. An empty model or tenant and a missing rank match all engines.
  std::vector<EngineNumber> find(const std::string& instance_id, const std::string& model, const std::string& tenant,
                                 std::optional<std::uint32_t> dp_rank) const;
  const EngineInfo* info(EngineNumber id) const;

  /// Returns the stream that takes the engine's batches and requests replays; nullptr if the engine was removed.
  EngineStream* stream(EngineNumber id);
  /// Checks the timeouts of all engines, see EngineStream::tick(). Must be called at least every few 100 ms.
  void tick(TimeNs now);
  /// Does maintenance on about `num_lines` cache lines of each index. Returns false if nothing is left to do.
  bool tidy(std::size_t num_lines);

  /// Returns the match of each rank of the live engines that `query` selects, including ranks without a matching block.
  /// kNotFound: no engine of this model, tenant and block size is registered without a salt or with the query's salt.
  Result<std::vector<RankMatch>> match(const PromptQuery& query);

  std::vector<EngineStatus> engines(TimeNs now) const;
  std::vector<NamespaceStatus> namespaces() const;

 private:
  using SpaceKey = std::tuple<std::string, std::string, std::string, std::uint32_t>;
  struct Space;
  class Engine;
  Space& space_of(const EngineInfo& info);
  void match_in(Space& space, const PromptQuery& query, std::string_view cache_salt, std::vector<RankMatch>& found);

  EngineIndexOptions options_;
  std::map<SpaceKey, std::unique_ptr<Space>> spaces_;
  std::map<EngineNumber, std::unique_ptr<Engine>> engines_;
  EngineNumber next_id_ = 1;
  std::vector<EngineMatch> matches_;
};

}  // namespace kvferry::controller
