#include "connector/runtime/links/shapes.h"

#include <algorithm>
#include <utility>

namespace kvferry {
namespace {

constexpr std::size_t kMapsKept = 64;  // limit on the entries in maps_; beyond this limit all entries are removed
// Limit on the runs in all entries of maps_ together, which then take at most 32 MiB (a ShardRun has 32 bytes). Beyond
// this limit all entries are removed. One entry has at most 2^20 runs, and as many layers and parts.
constexpr std::size_t kRunsKept = 1 << 20;
constexpr std::size_t kWaitingMax = 256;  // limit on waiting_; beyond this limit requests are refused
// Limit on how often a rank reads its chunk to hash the runs of one reader. The runs of a real reader do not overlap,
// unless they are equal, and equal runs are hashed once. But a peer could name shards whose runs together are thousands
// of times as long as the chunk, and the worker's service thread hashes a chunk without a break.
constexpr std::uint64_t kReadsMax = 4;

/// Returns true if a node has one pipeline stage. Nodes whose version is too old to send shards have only one.
bool is_one_stage(const std::vector<Shard>& shards) {
  return std::all_of(shards.begin(), shards.end(), [&](const Shard& shard) {
    return shard.first_layer == shards[0].first_layer && shard.num_layers == shards[0].num_layers;
  });
}

/// Returns true if the cells of both ranks have the same size. Returns false also if a chunk can't be divided into
/// equal cells.
bool same_cell_bytes(const RankEndpoint& a, const RankEndpoint& b) {
  const std::uint64_t a_cells = a.shard.num_cells(), b_cells = b.shard.num_cells();
  return a.chunk_bytes % a_cells == 0 && b.chunk_bytes % b_cells == 0 &&
         a.chunk_bytes / a_cells == b.chunk_bytes / b_cells;
}

constexpr const char* kNoParts =
    "one of the two nodes does not say which parts of the layers' states its ranks have; both need a version of "
    "kvferry that does, or the same tensor parallel size";
constexpr const char* kOldHolder =
    "; the holder's version of kvferry serves only nodes with its own number of ranks and its own chunk size";

/// Returns in a sentence how the nodes differ in their number of ranks or else in their chunks' sizes.
std::string difference_of(const std::vector<RankEndpoint>& here, const std::vector<RankEndpoint>& there) {
  if (here.size() != there.size())
    return fmt::format("the holder has {} ranks and this node has {}; both need the same number of ranks", there.size(),
                       here.size());
  std::size_t rank = 0;
  while (rank + 1 < here.size() && here[rank].chunk_bytes == there[rank].chunk_bytes) ++rank;
  return fmt::format(
      "the chunks of rank {} have {} bytes at the holder and {} here; both nodes need chunks of the same size", rank,
      there[rank].chunk_bytes, here[rank].chunk_bytes);
}

}  // namespace

std::vector<Shard> shards_of(const std::vector<RankEndpoint>& ranks) {
  std::vector<Shard> shards;
  for (const RankEndpoint& rank : ranks) shards.push_back(rank.shard);
  return shards;
}

std::vector<ShardParts> parts_of(const std::vector<RankEndpoint>& ranks) {
  std::vector<ShardParts> parts;
  for (const RankEndpoint& rank : ranks) parts.push_back(rank.parts);
  const bool has_any = std::ranges::any_of(parts, [](const ShardParts& rank) { return !rank.kinds.empty(); });
  return has_any ? parts : std::vector<ShardParts>();
}

Result<void> check_ranks(const std::vector<RankEndpoint>& ranks) {
  KVFERRY_TRY(check_shards(shards_of(ranks)));
  const std::vector<ShardParts> parts = parts_of(ranks);
  if (parts.empty()) return {};
  KVFERRY_TRY(check_parts(parts));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (parts[rank].num_bytes() != ranks[rank].chunk_bytes)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the parts of rank {} have {} bytes, but its chunks have {}; both must be equal", rank,
                               parts[rank].num_bytes(), ranks[rank].chunk_bytes)};
  return {};
}

Result<ShardMap> fit_answer(const std::vector<RankEndpoint>& here, LeaseAnswer& answer) {
  const std::vector<RankEndpoint>& there = answer.ranks;
  const auto refuse = [](std::string why) { return Error{ErrorCode::kRefused, std::move(why)}; };
  const bool is_like = std::equal(here.begin(), here.end(), there.begin(), there.end(),
                                  [](const auto& a, const auto& b) { return a.chunk_bytes == b.chunk_bytes; });
  const bool says_shape =
      std::none_of(there.begin(), there.end(), [](const auto& r) { return r.shard.num_layers == 0; });
  const std::vector<Shard> ours = shards_of(here), theirs = shards_of(there);
  if (!says_shape || ours == theirs) {
    if (!is_like) return refuse(difference_of(here, there) + (says_shape ? "" : kOldHolder));
    if (!says_shape && !is_one_stage(ours))
      return refuse(
          "this node has pipeline stages, which the holder's version of kvferry does not serve; upgrade kvferry there");
    for (LeasedChunk& chunk : answer.reply.chunks) {
      chunk.run_checksums.clear();
      if (chunk.frames.size() != here.size()) chunk.frames.clear();
    }
    return ShardMap{};
  }
  const std::vector<ShardParts> our_parts = parts_of(here), their_parts = parts_of(there);
  const bool has_parts = !our_parts.empty() || !their_parts.empty();
  if (has_parts && (our_parts.empty() || their_parts.empty())) return refuse(kNoParts);
  if (const auto fits = has_parts ? check_ranks(there) : Result<void>(); !fits) return refuse(fits.error().what);
  Result<ShardMap> map = has_parts ? map_parts(our_parts, their_parts) : map_shards(ours, theirs);
  if (!map) return refuse(map.error().what);
  for (const RankEndpoint& rank : there) {
    if (!has_parts && !same_cell_bytes(here[0], rank))
      return refuse(fmt::format(
          "the holder's chunk of {} layers and {} heads has {} bytes, which does not fit this node's chunk "
          "of {} layers and {} heads, which has {} bytes; both need the same number of bytes for each layer "
          "and head",
          rank.shard.num_layers, rank.shard.num_heads, rank.chunk_bytes, here[0].shard.num_layers,
          here[0].shard.num_heads, here[0].chunk_bytes));
  }
  std::erase_if(answer.reply.chunks, [&](LeasedChunk& chunk) {
    chunk.checksums.clear();  // these are checksums of the holder's ranks, whose chunks differ from this node's
    return !std::equal(map->begin(), map->end(), chunk.run_checksums.begin(), chunk.run_checksums.end(),
                       [](const auto& runs, const auto& checksums) { return runs.size() == checksums.size(); });
  });
  return map;
}

PullOrder order_for(std::uint32_t rank, const StartPull& wanted, const std::vector<RankEndpoint>& here,
                    const std::vector<RankEndpoint>& there, const ShardMap& map, TimeNs now) {
  PullOrder order{wanted.pull, {}, {}, std::max<std::int64_t>(1, (wanted.deadline - now) / kMillisecond), wanted.items};
  if (map.empty()) {
    order.remote_address = there[rank].transport_address;
    order.remote_region = there[rank].pool_region;
    order.remote_frames = there[rank].frames_region;
    order.remote_frame_bytes = there[rank].frame_bytes;
    return order;
  }
  order.num_cells = here[rank].parts.kinds.empty() ? here[rank].shard.num_cells() : here[rank].chunk_bytes;
  order.runs = map[rank];
  std::map<std::uint32_t, std::uint32_t> source_of;  // [holder's rank] index in order.sources
  for (ShardRun& run : order.runs) {
    const RankEndpoint& holder = there[run.holder];
    const auto [found, is_new] = source_of.try_emplace(run.holder, static_cast<std::uint32_t>(order.sources.size()));
    if (is_new) order.sources.push_back({holder.transport_address, holder.pool_region, holder.chunk_bytes});
    run.holder = found->second;
  }
  for (PullItem& item : order.items) {  // leaves out the checksums for other ranks
    const bool is_there = rank < item.run_checksums.size();
    item.frames.clear();  // frames are read by nodes of the same shape only
    item.run_checksums = {is_there ? std::move(item.run_checksums[rank]) : std::vector<std::uint64_t>{}};
  }
  return order;
}

Result<void> RunChecksums::check_reads(const ShardMap& map) const {
  std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>> hashed(here_.size());  // [rank] (source, cells)
  for (const std::vector<ShardRun>& runs : map)
    for (const ShardRun& run : runs)
      if (!is_whole(run)) hashed[run.holder].emplace_back(run.source, run.cells);
  for (std::uint32_t rank = 0; rank < hashed.size(); ++rank) {
    std::ranges::sort(hashed[rank]);
    std::uint64_t num_cells = 0;
    const auto end = std::unique(hashed[rank].begin(), hashed[rank].end());
    std::for_each(hashed[rank].begin(), end, [&](const auto& run) { num_cells += run.second; });
    if (num_cells <= kReadsMax * this->num_cells(rank)) continue;
    return Error{ErrorCode::kRefused,
                 fmt::format("the parts of the model that the reading node's ranks hold overlap too much: rank {} of "
                             "the holder would have to hash {} {} of a chunk of {}; at most {} times as many as the "
                             "chunk has are allowed",
                             rank, num_cells, parts_.empty() ? "cells (heads of a layer)" : "bytes",
                             this->num_cells(rank), kReadsMax)};
  }
  return {};
}

Result<std::shared_ptr<const ShardMap>> RunChecksums::map_for(const LeaseRequest& request) {
  Readers readers{request.shards, request.parts};
  if (const auto found = maps_.find(readers); found != maps_.end()) return found->second;
  if (parts_.empty() != request.parts.empty()) return Error{ErrorCode::kRefused, kNoParts};
  if (!parts_.empty() && request.parts.size() != request.shards.size())
    return Error{ErrorCode::kRefused,
                 fmt::format("the reading node has {} ranks, but says of {} which parts they have; it must say so of "
                             "each",
                             request.shards.size(), request.parts.size())};
  Result<ShardMap> map = parts_.empty() ? map_shards(request.shards, here_) : map_parts(request.parts, parts_);
  if (!map) return Error{ErrorCode::kRefused, map.error().what};
  KVFERRY_TRY(check_reads(*map));
  std::size_t num_runs = 0;
  for (const std::vector<ShardRun>& runs : *map) num_runs += runs.size();
  for (const ShardParts& rank : request.parts) {  // these are kept too, and count as runs
    num_runs += rank.kinds.size();
    for (const std::vector<LayerPart>& kind : rank.parts) num_runs += kind.size();
  }
  if (maps_.size() >= kMapsKept || num_runs_kept_ + num_runs > kRunsKept) {
    maps_.clear();
    num_runs_kept_ = 0;
  }
  num_runs_kept_ += num_runs;
  return maps_[std::move(readers)] = std::make_shared<const ShardMap>(std::move(*map));
}

Result<void> RunChecksums::check(const LeaseRequest& request) {
  if (request.shards.empty() && !is_one_stage(here_))
    return Error{
        ErrorCode::kRefused,
        "the holder has pipeline stages, which the reading node's version of kvferry can't read; upgrade it there"};
  if (!is_needed(request)) return {};
  if (waiting_.size() >= kWaitingMax)
    return Error{
        ErrorCode::kRefused,
        fmt::format(
            "the holder has {} lease requests that wait for checksums, because their nodes have other tensor or "
            "pipeline parallelism; it allows no more",
            waiting_.size())};
  KVFERRY_TRY(map_for(request));
  return {};
}

std::vector<RunChecksums::RankOrder> RunChecksums::begin(Asker asker, const LeaseRequest& request, LeaseAnswer answer,
                                                         TimeNs now, TimeNs patience) {
  Waiting waiting{std::move(asker), std::move(answer), {}, map_for(request).value(), {}, {}, now + patience};
  for (const LeasedChunk& chunk : waiting.answer.reply.chunks) waiting.keys.push_back(request.keys.at(chunk.index));
  for (const std::vector<ShardRun>& runs : *waiting.map) {
    for (const ShardRun& run : runs)
      if (!is_whole(run)) waiting.parts[run.holder].index.emplace(std::pair(run.source, run.cells), 0);
  }
  std::vector<RankOrder> orders;
  ++last_order_;
  for (auto& [rank, part] : waiting.parts) {
    for (auto& [run, number] : part.index) {
      number = part.runs.size();
      part.runs.push_back({rank, run.first, 0, run.second});
    }
    if (waiting.answer.reply.chunks.empty()) continue;
    ChecksumOrder order{last_order_, num_cells(rank), part.runs, {}, patience / kMillisecond, rank};
    for (const LeasedChunk& chunk : waiting.answer.reply.chunks)
      order.items.push_back({chunk.chunk, chunk.num_tokens, chunk.checksums.at(rank)});
    orders.push_back({rank, std::move(order)});
  }
  waiting_.emplace(last_order_, std::move(waiting));
  return orders;
}

void RunChecksums::take(const ChecksumOutcome& outcome) {
  const auto found = waiting_.find(outcome.order);
  if (found == waiting_.end()) return;  // the outcome came too late
  Waiting& waiting = found->second;
  const auto part = waiting.parts.find(outcome.rank);
  if (part == waiting.parts.end() || outcome.item >= waiting.keys.size()) return;
  if (outcome.ok && outcome.checksums.size() != part->second.runs.size()) return;
  waiting.outcomes[{outcome.rank, outcome.item}] = outcome;
}

std::vector<RunChecksums::Ready> RunChecksums::take_ready(TimeNs now) {
  std::vector<Ready> ready;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Waiting& waiting = it->second;
    const bool is_complete = waiting.outcomes.size() == waiting.parts.size() * waiting.keys.size();
    if (!is_complete && now < waiting.deadline) {
      ++it;
      continue;
    }
    ready.push_back(finish(std::move(waiting)));
    it = waiting_.erase(it);
  }
  return ready;
}

RunChecksums::Ready RunChecksums::finish(Waiting waiting) const {
  Ready ready{std::move(waiting.asker), {}, {}, 0};
  std::vector<LeasedChunk> chunks = std::exchange(waiting.answer.reply.chunks, {});
  ready.answer = std::move(waiting.answer);
  for (std::uint32_t i = 0; i < chunks.size(); ++i) {
    bool is_damaged = false, is_late = false;
    for (const auto& entry : waiting.parts) {
      const auto outcome = waiting.outcomes.find({entry.first, i});
      is_late |= outcome == waiting.outcomes.end();
      is_damaged |= outcome != waiting.outcomes.end() && !outcome->second.ok;
    }
    if (is_damaged) ready.damaged.push_back(waiting.keys[i]);
    ready.num_late += is_late && !is_damaged;
    if (is_damaged || is_late) continue;
    for (const std::vector<ShardRun>& runs : *waiting.map) {
      std::vector<std::uint64_t>& checksums = chunks[i].run_checksums.emplace_back();
      for (const ShardRun& run : runs) {
        if (is_whole(run)) {
          checksums.push_back(chunks[i].checksums.at(run.holder));
        } else {
          const Part& part = waiting.parts.at(run.holder);
          checksums.push_back(
              waiting.outcomes.at({run.holder, i}).checksums.at(part.index.at({run.source, run.cells})));
        }
      }
    }
    ready.answer.reply.chunks.push_back(std::move(chunks[i]));
  }
  return ready;
}

}  // namespace kvferry
