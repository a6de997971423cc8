#include "controller/engines/engine_directory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kEnginesMax = 1024;
constexpr std::size_t kRanksMax = 64;  // limit on ranks of an engine; batches of further ranks count as malformed

}  // namespace

/// The engines that have the same model, tenant, salt and block size.
struct EngineDirectory::Space {
  explicit Space(const EngineIndexOptions& options) : index(options) {}
  EngineIndex index;
  std::size_t num_engines = 0;
  struct Owner {
    const Engine* engine = nullptr;
    std::uint32_t rank = 0;
  };
  std::vector<Owner> owners;  // [HolderIndex] engine and rank of this holder; no engine: the index is unused
};

class EngineDirectory::Engine final : public EngineStreamSink, public EngineEventSink {
 public:
  Engine(const EngineInfo& info, Space& space, TimeNs now)
      : info_(info), space_(space), stream_({.has_replay = !info.replay_endpoint.empty()}, *this, now) {
    ++space_.num_engines;
    if (info_.dp_rank) holder_of(*info_.dp_rank);  // makes status() list the rank even before the rank's first batch
  }
  ~Engine() override {
    for (const auto& [rank, holder] : holders_) {
      space_.index.remove_holder(holder);
      space_.owners[holder] = {};
    }
    --space_.num_engines;
  }

  void apply(std::string_view payload) override {
    const std::uint32_t rank = info_.dp_rank ? *info_.dp_rank : rank_of_batch(payload).value_or(0);
    const std::optional<HolderIndex> holder = holder_of(rank);
    if (!holder) {
      ++counters_.batches_malformed;
      return;
    }
    holder_ = *holder;
    const Result<EngineBatch> batch = decoder_.decode(payload, *this);
    if (!batch) {
      if (std::has_single_bit(++counters_.batches_malformed))
        log().warn("engine '{}': {}; all blocks of this engine are removed from the controller's index",
                   info_.instance_id, batch.error().what);
      drop_everything();  // events that could not be read may have removed any block
      return;
    }
    counters_.events += batch->num_events;
    counters_.events_unknown += batch->num_unknown;
    counters_.events_malformed += batch->num_malformed;
  }
  void drop_everything() override {
    for (const auto& [rank, holder] : holders_) space_.index.clear(holder);
  }
  void stored(const BlocksStored& blocks) override { space_.index.stored(holder_, blocks); }
  void removed(const BlocksRemoved& blocks) override { space_.index.removed(holder_, blocks); }
  void all_cleared() override {
    ++counters_.clears;
    space_.index.clear(holder_);
  }

  EngineStatus status(TimeNs now) const {
    EngineStatus status{.info = info_,
                        .is_live = stream_.is_live(),
                        .is_connected = stream_.is_connected(),
                        .is_confirmed = stream_.is_confirmed(),
                        .silent_for = now - stream_.last_received(),
                        .stream = stream_.counters(),
                        .batches = counters_,
                        .blocks = {}};
    for (const auto& [rank, holder] : holders_) {
      for (std::size_t tier = 0; tier < kNumTiers; ++tier)
        status.blocks[rank][tier] = space_.index.num_blocks(holder, static_cast<Tier>(tier));
    }
    return status;
  }
  const EngineInfo& info() const { return info_; }
  EngineStream& stream() { return stream_; }
  const EngineStream& stream() const { return stream_; }
  const std::map<std::uint32_t, HolderIndex>& holders() const { return holders_; }

 private:
  std::optional<HolderIndex> holder_of(std::uint32_t rank) {
    if (const auto known = holders_.find(rank); known != holders_.end()) return known->second;
    if (holders_.size() >= kRanksMax) return std::nullopt;
    const HolderIndex holder = space_.index.add_holder(info_.lora_name);
    space_.owners.resize(std::max<std::size_t>(space_.owners.size(), holder + std::size_t{1}));
    space_.owners[holder] = {this, rank};
    holders_[rank] = holder;
    return holder;
  }

  EngineInfo info_;
  Space& space_;
  EngineStream stream_;
  EngineEventDecoder decoder_;
  EngineBatchCounters counters_;
  std::map<std::uint32_t, HolderIndex> holders_;
  HolderIndex holder_ = 0;  // holder for the rank of the current batch
};

EngineDirectory::EngineDirectory(const EngineIndexOptions& options) : options_(options) {}
EngineDirectory::~EngineDirectory() { engines_.clear(); }  // engines refer to spaces_, which must outlive them

EngineDirectory::Space& EngineDirectory::space_of(const EngineInfo& info) {
  std::unique_ptr<Space>& space = spaces_[{info.model, info.tenant, info.salt, info.block_size}];
  if (!space) {
    EngineIndexOptions options = options_;
    options.block_size = info.block_size;
    space = std::make_unique<Space>(options);
  }
  return *space;
}

Result<EngineDirectory::Added> EngineDirectory::add(const EngineInfo& info, TimeNs now) {
  Added added{.id = 0, .replaced = {}};
  for (const EngineNumber other : find(info.instance_id, info.model, info.tenant, {})) {
    const EngineInfo& known = engines_.at(other)->info();
    if (known.dp_rank != info.dp_rank) continue;
    if (known.endpoint == info.endpoint && known.replay_endpoint == info.replay_endpoint && known.salt == info.salt &&
        known.lora_name == info.lora_name && known.block_size == info.block_size)
      return Added{.id = other, .replaced = {}, .is_known = true};
    added.replaced = other;
  }
  if (!added.replaced && engines_.size() >= kEnginesMax)
    return Error{ErrorCode::kFull, fmt::format("{} engines are registered, which is the limit; unregister others first",
                                               engines_.size())};
  if (added.replaced) remove(*added.replaced);
  added.id = next_id_++;
  engines_[added.id] = std::make_unique<Engine>(info, space_of(info), now);
  return added;
}

void EngineDirectory::remove(EngineNumber id) {
  const auto it = engines_.find(id);
  if (it == engines_.end()) return;
  const EngineInfo& info = it->second->info();
  const SpaceKey key{info.model, info.tenant, info.salt, info.block_size};
  engines_.erase(it);
  if (const auto space = spaces_.find(key); space->second->num_engines == 0) spaces_.erase(space);
}

std::vector<EngineNumber> EngineDirectory::find(const std::string& instance_id, const std::string& model,
                                                const std::string& tenant, std::optional<std::uint32_t> dp_rank) const {
  std::vector<EngineNumber> found;
  for (const auto& [id, engine] : engines_) {
    const EngineInfo& info = engine->info();
    if (info.instance_id == instance_id && (model.empty() || info.model == model) &&
        (tenant.empty() || info.tenant == tenant) && (!dp_rank || info.dp_rank.value_or(0) == *dp_rank))
      found.push_back(id);
  }
  return found;
}

const EngineInfo* EngineDirectory::info(EngineNumber id) const {
  const auto it = engines_.find(id);
  return it == engines_.end() ? nullptr : &it->second->info();
}

EngineStream* EngineDirectory::stream(EngineNumber id) {
  const auto it = engines_.find(id);
  return it == engines_.end() ? nullptr : &it->second->stream();
}

void EngineDirectory::tick(TimeNs now) {
  for (const auto& [id, engine] : engines_) {
    const bool was_live = engine->stream().is_live();
    engine->stream().tick(now);
    if (was_live && !engine->stream().is_live())
      log().warn(
          "engine '{}' at {} is lost: it was silent or disconnected for more than {} s; queries ignore its blocks "
          "until it is back",
          engine->info().instance_id, engine->info().endpoint, EngineStreamOptions{}.lease / kSecond);
  }
}

bool EngineDirectory::tidy(std::size_t num_lines) {
  bool is_busy = false;
  for (const auto& [key, space] : spaces_) is_busy = space->index.tidy(num_lines) || is_busy;
  return is_busy;
}

void EngineDirectory::match_in(Space& space, const PromptQuery& query, std::string_view cache_salt,
                               std::vector<RankMatch>& found) {
  if (query.hashes.empty())
    space.index.match_tokens(query.tokens, {query.lora_name, query.lora_id, cache_salt}, matches_);
  else
    space.index.match_hashes(query.hashes, matches_);
  std::vector<const EngineMatch*> match_of(space.owners.size());
  for (const EngineMatch& match : matches_) match_of[match.holder] = &match;
  for (std::size_t holder = 0; holder < space.owners.size(); ++holder) {
    const auto& [engine, rank] = space.owners[holder];
    if (engine == nullptr || !engine->stream().is_live()) continue;
    if (query.instance_id && engine->info().instance_id != *query.instance_id) continue;
    RankMatch& match = found.emplace_back(RankMatch{.instance_id = engine->info().instance_id,
                                                    .block_size = engine->info().block_size,
                                                    .rank = rank,
                                                    .in_tier = {},
                                                    .up_to_tier = {},
                                                    .confirmed = engine->stream().is_confirmed()});
    if (match_of[holder] == nullptr) continue;
    for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
      match.in_tier[tier] = match_of[holder]->in_tier[tier] * space.index.block_size();
      match.up_to_tier[tier] = match_of[holder]->up_to_tier[tier] * space.index.block_size();
    }
  }
}

Result<std::vector<RankMatch>> EngineDirectory::match(const PromptQuery& query) {
  std::vector<RankMatch> found;
  bool is_known = false;
  for (const auto& [key, space] : spaces_) {
    const auto& [model, tenant, salt, block_size] = key;
    if (model != query.model || tenant != query.tenant) continue;
    if (query.block_size && *query.block_size != block_size) continue;
    // If engines with this block size registered the query's salt, only these engines match. Otherwise the query's salt
    // is the request's cache salt, which is part of the block keys of engines without a salt.
    if (salt != query.salt && !salt.empty()) continue;
    const bool has_own = spaces_.contains(SpaceKey{model, tenant, query.salt, block_size});
    if (has_own != (salt == query.salt)) continue;
    is_known = true;
    match_in(*space, query, has_own ? std::string_view() : std::string_view(query.salt), found);
  }
  if (!is_known)
    return Error{
        ErrorCode::kNotFound,
        fmt::format("no engine of model '{}', tenant '{}'{} is registered without a salt or with the query's salt; "
                    "GET /status lists the registered engines",
                    query.model, query.tenant,
                    query.block_size ? fmt::format(", block size {}", *query.block_size) : std::string())};
  return found;
}

std::vector<EngineStatus> EngineDirectory::engines(TimeNs now) const {
  std::vector<EngineStatus> all;
  for (const auto& [id, engine] : engines_) all.push_back(engine->status(now));
  return all;
}

std::vector<NamespaceStatus> EngineDirectory::namespaces() const {
  std::vector<NamespaceStatus> all;
  for (const auto& [key, space] : spaces_) {
    const auto& [model, tenant, salt, block_size] = key;
    all.push_back({model, tenant, salt, block_size, space->index.num_blocks(), space->index.num_hashes(),
                   space->index.counters()});
  }
  return all;
}

}  // namespace kvferry::controller
