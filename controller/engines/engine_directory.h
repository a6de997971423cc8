// The engines that were registered for their own KV events: who they are, what they hold, and who matches a prompt
// best. Sockets are the front's business (engine_events_front.h), JSON is http_api.h's. Pure: time is handed in.
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
  std::string instance_id;  // what routers know it by
  std::string model;
  std::string tenant = "default";
  std::string salt;                      // sets models apart that have one name
  std::string lora_name;                 // of events that name no adapter
  std::string kind;                      // vLLM, SGLang ...: for people
  std::string endpoint;                  // where it publishes
  std::string replay_endpoint;           // may be empty
  std::uint32_t block_size = 0;          // tokens
  std::optional<std::uint32_t> dp_rank;  // none: as its batches say
};

using EngineNumber = std::uint32_t;  // grows; never used again

struct EngineDirectoryOptions {
  std::size_t engines_max = 1024;
  std::uint32_t ranks_max = 64;  // an engine
  EngineStreamOptions stream;
  EngineIndexOptions index;  // block_size is the namespace's
};

struct EngineBatchCounters {
  std::uint64_t events = 0;
  std::uint64_t events_unknown = 0;
  std::uint64_t events_malformed = 0;
  std::uint64_t batches_malformed = 0;
  std::uint64_t clears = 0;  // told by the engine
};

struct EngineStatus {
  EngineInfo info;
  bool is_live = false, is_connected = false, is_confirmed = false;
  TimeNs silent_for = 0;
  EngineStreamCounters stream;
  EngineBatchCounters batches;
  std::map<std::uint32_t, std::array<std::size_t, kNumTiers>> blocks;  // by rank
};

struct NamespaceStatus {
  std::string model, tenant, salt;
  std::uint32_t block_size = 0;
  std::size_t num_blocks = 0, num_hashes = 0;
  EngineIndexCounters counters;
};

/// One rank's prefix of a prompt, in tokens.
struct RankMatch {
  const EngineInfo* engine = nullptr;  // valid until the directory changes
  std::uint32_t rank = 0;
  std::uint32_t in_tier[kNumTiers] = {};
  std::uint32_t up_to_tier[kNumTiers] = {};
  bool confirmed = true;  // false: events are missing and asked for
};

struct PromptQuery {
  std::string model;
  std::string tenant = "default";
  std::string salt;                         // as registered; or the request's cache salt
  std::optional<std::uint32_t> block_size;  // none: all that the model's engines use
  std::string lora_name;
  std::optional<std::uint64_t> lora_id;
  std::optional<std::string> instance_id;  // none: all
  std::vector<std::uint32_t> tokens;       // or:
  std::vector<ShortKey> hashes;
};

/// Threads: one at a time.
class EngineDirectory {
 public:
  explicit EngineDirectory(EngineDirectoryOptions options);
  ~EngineDirectory();

  struct Added {
    EngineNumber id;
    std::optional<EngineNumber> replaced;  // whoever had the same instance, tenant, model and rank; it is gone
    bool is_known = false;                 // it was there already, to the letter
  };
  /// kFull: as many engines as are allowed.
  Result<Added> add(const EngineInfo& info, TimeNs now);
  void remove(EngineNumber id);
  /// Of an instance; an empty model, tenant or no rank stands for all.
  std::vector<EngineNumber> find(const std::string& instance_id, const std::string& model, const std::string& tenant,
                                 std::optional<std::uint32_t> dp_rank) const;
  const EngineInfo* info(EngineNumber id) const;

  /// The order of an engine's batches: tell it what comes, and take its wishes. nullptr: it is gone.
  EngineStream* stream(EngineNumber id);
  /// Expires the silent. Call it at least every few 100 ms.
  void tick(TimeNs now);
  /// False: nothing is left to do.
  bool tidy(std::size_t num_lines);

  /// Ranks that have the first block, and also those of the named instance that have none. kNotFound: no engine of this
  /// model, tenant and block size is registered.
  Result<std::vector<RankMatch>> match(const PromptQuery& query);

  std::size_t num_engines() const { return engines_.size(); }
  std::vector<EngineStatus> engines(TimeNs now) const;
  std::vector<NamespaceStatus> namespaces() const;

 private:
  using SpaceKey = std::tuple<std::string, std::string, std::string, std::uint32_t>;
  struct Space;
  class Engine;
  Space& space_of(const EngineInfo& info);
  void match_in(Space& space, const PromptQuery& query, std::string_view cache_salt, std::vector<RankMatch>& found);

  EngineDirectoryOptions options_;
  std::map<SpaceKey, std::unique_ptr<Space>> spaces_;
  std::map<EngineNumber, std::unique_ptr<Engine>> engines_;
  EngineNumber next_id_ = 1;
  std::vector<EngineMatch> matches_;
};

}  // namespace kvferry::controller
