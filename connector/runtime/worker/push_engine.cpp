#include "connector/runtime/worker/push_engine.h"

#include <algorithm>

#include "transport/base/checksum.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

constexpr std::size_t kDroppedMax = 4096;  // pushes are forgotten for good after that many others

}  // namespace

bool PushEngine::take(const std::string& sender, const Envelope& envelope) {
  const std::lock_guard lock(mutex_);
  switch (static_cast<NodeMessage>(envelope.type)) {
    case NodeMessage::kPushOrder: {
      scheduler_ = sender;
      Result<PushOrder> order = decode<PushOrder>(envelope.body, "push order");
      if (!order || dropped_.contains(order->push)) return true;
      const std::uint64_t id = order->push;
      Push& push = pushes_[id];
      push.order = std::move(*order);
      std::vector<std::uint32_t> indices;
      for (const auto& [index, item] : push.items) indices.push_back(index);
      for (const std::uint32_t index : indices) advance(id, index);
      return true;
    }
    case NodeMessage::kPushStart: {
      scheduler_ = sender;
      const Result<PushStart> start = decode<PushStart>(envelope.body, "push start");
      if (!start) return true;
      Item& item = item_of(start->push, start->index, start->chunk, start->num_tokens);
      item.is_saved = item.is_whole = true;
      const std::uint32_t rank = parts_.core.rank();
      item.failed = rank >= start->checksums.size();
      if (!item.failed) item.checksum = start->checksums[rank];
      advance(start->push, start->index);
      return true;
    }
    case NodeMessage::kPushDrop: {
      scheduler_ = sender;
      if (const auto id = decode<std::uint64_t>(envelope.body, "push drop")) drop(*id);
      return true;
    }
    case NodeMessage::kLendOrder: {
      scheduler_ = sender;
      if (const auto order = decode<GrantOrder>(envelope.body, "lend order")) lend(*order);
      return true;
    }
    case NodeMessage::kReclaim: {
      scheduler_ = sender;
      if (const auto order = decode<Revocation>(envelope.body, "reclaim")) reclaim(*order);
      return true;
    }
    default:
      return false;
  }
}

// ---- sending ----

PushEngine::Item& PushEngine::item_of(std::uint64_t push, std::uint32_t index, ChunkRef chunk,
                                      std::uint32_t num_tokens) {
  Item& item = pushes_[push].items[index];
  item.chunk = chunk;
  item.num_tokens = num_tokens;
  return item;
}

void PushEngine::layer_saved(const SaveItem& save, std::uint32_t layer, std::uint64_t checksum) {
  {
    const std::lock_guard lock(mutex_);
    Item& item = item_of(save.push, save.push_index, save.chunk, save.num_tokens);
    if (item.layer_sums.size() != layer) return;  // one was left out: the chunk goes whole, or from there on
    item.layer_sums.push_back(checksum);
    advance(save.push, save.push_index);
  }
  on_news();
}

void PushEngine::saved(const SaveItem& save, bool ok, std::uint64_t checksum) {
  {
    const std::lock_guard lock(mutex_);
    Item& item = item_of(save.push, save.push_index, save.chunk, save.num_tokens);
    item.is_saved = true;
    item.is_whole = ok;
    item.failed |= !ok;
    item.checksum = checksum;
    advance(save.push, save.push_index);
  }
  on_news();
}

std::uint64_t PushEngine::layer_bytes(const Item& item) const {
  return item.num_tokens * parts_.bytes_per_token / parts_.num_layers;
}

CopyRange PushEngine::layers(const Item& item, std::uint32_t first, std::uint32_t end) const {
  const std::uint64_t bytes = layer_bytes(item);
  return {item.chunk.slot * parts_.chunk_bytes + first * bytes, first * bytes, (end - first) * bytes};
}

/// How many layers may be sent. The last one waits for the end of the save, which it tells the transfer.
std::uint32_t PushEngine::layers_ready(const Item& item) const {
  if (item.is_whole) return parts_.num_layers;
  return std::min(static_cast<std::uint32_t>(item.layer_sums.size()), parts_.num_layers - 1);
}

/// Does for this chunk what can be done now.
void PushEngine::advance(std::uint64_t id, std::uint32_t index) {
  Push& push = pushes_.at(id);
  Item& item = push.items.at(index);
  if (item.is_over) return;
  if (dropped_.contains(id)) push.is_dropped = true;
  const bool is_ended = push.is_dropped || item.failed;
  if (item.transfer) {
    if (is_ended)
      parts_.transport.cancel(*item.transfer);
    else
      feed(item);
    return;
  }
  if (is_ended) {
    // A save that still writes the slot tells its end, and with it ours.
    if (item.is_saved) end(id, index, item, false, push.is_dropped || item.is_whole ? "" : "its save failed");
    return;
  }
  if (!push.order) return;
  if (index >= push.order->grants.size() || push.order->grants[index].empty()) {
    if (item.is_saved) end(id, index, item, false, "");  // not wanted
    return;
  }
  begin(push, id, index, item);
}

void PushEngine::begin(Push& push, std::uint64_t id, std::uint32_t index, Item& item) {
  const std::uint32_t num_layers = layers_ready(item);
  if (num_layers == 0) return;
  const Result<PeerId> peer = parts_.transport.connect(push.order->remote_address);
  if (!peer) {
    item.failed = true;
    if (item.is_saved) end(id, index, item, false, peer.error().what);
    return;
  }
  PagedTransfer transfer{*peer, Direction::kPush, parts_.pool_region, push.order->grants[index], {}, {}};
  if (item.is_whole) {
    transfer.ranges.push_back(layers(item, 0, parts_.num_layers));
    transfer.checksums.push_back(item.checksum);
  } else {
    transfer.is_fed = true;
    for (std::uint32_t layer = 0; layer < num_layers; ++layer) {
      transfer.ranges.push_back(layers(item, layer, layer + 1));
      transfer.checksums.push_back(item.layer_sums[layer]);
    }
  }
  const Result<TransferId> started = parts_.transport.submit(std::move(transfer));
  if (started) {
    item.transfer = *started;
    item.is_fed_whole = item.is_whole;
    item.layers_fed = num_layers;
    running_[*started] = {id, index};
    full_.erase({id, index});
  } else if (started.error().code == ErrorCode::kFull) {
    full_.insert({id, index});
  } else {
    item.failed = true;
    if (item.is_saved) end(id, index, item, false, started.error().what);
  }
}

/// What lies in the slot since the last time.
void PushEngine::feed(Item& item) {
  if (item.is_fed_whole) return;
  const std::uint32_t ready = layers_ready(item);
  if (ready == item.layers_fed) return;
  std::vector<CopyRange> ranges;
  std::vector<std::uint64_t> checksums;
  for (std::uint32_t layer = item.layers_fed; layer < ready; ++layer) {
    const CopyRange range = layers(item, layer, layer + 1);
    ranges.push_back(range);
    checksums.push_back(layer < item.layer_sums.size()
                            ? item.layer_sums[layer]
                            : chunk_checksum(parts_.pool.subspan(range.local_offset, range.bytes)));
  }
  item.layers_fed = ready;
  item.is_fed_whole = item.is_whole;
  const Result<void> fed =
      parts_.transport.feed(*item.transfer, std::move(ranges), std::move(checksums), item.is_fed_whole);
  if (!fed) {
    item.failed = true;  // its completion says why, or comes with the cancellation
    parts_.transport.cancel(*item.transfer);
  }
}

bool PushEngine::completed(const Completion& completion) {
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(completion.id);
  if (found == running_.end()) return false;
  const auto [id, index] = found->second;
  running_.erase(found);
  Item& item = pushes_.at(id).items.at(index);
  item.transfer.reset();
  const bool ok = completion.code == ErrorCode::kOk && item.is_fed_whole && !item.failed;
  item.failed |= !ok;
  if (!ok && !completion.what.empty())
    log().warn("pushing a chunk of {} tokens failed: {}", item.num_tokens, completion.what);
  if (item.is_saved) end(id, index, item, ok, {});
  return true;
}

void PushEngine::end(std::uint64_t id, std::uint32_t index, Item& item, bool ok, std::string what) {
  if (!what.empty()) log().warn("pushing a chunk of {} tokens failed: {}", item.num_tokens, what);
  item.is_over = true;
  full_.erase({id, index});
  completion_queue_.emplace_back(NodeMessage::kPushOutcome,
                       encode(PushOutcome{id, parts_.core.rank(), index, ok, std::move(what)}));
}

void PushEngine::drop(std::uint64_t id) {
  dropped_.insert(id);
  if (dropped_.size() > kDroppedMax) dropped_.erase(dropped_.begin());
  const auto found = pushes_.find(id);
  if (found == pushes_.end()) return;
  std::vector<std::uint32_t> open;
  for (const auto& [index, item] : found->second.items)
    if (!item.is_over) open.push_back(index);
  for (const std::uint32_t index : open) advance(id, index);
  if (open.empty()) pushes_.erase(found);
}

// ---- receiving ----

void PushEngine::lend(const GrantOrder& order) {
  GrantOutcome outcome{order.ticket, parts_.core.rank(), {}};
  for (const GrantedChunk& wanted : order.chunks) {
    {
      const std::lock_guard lock(parts_.core_mutex);
      parts_.core.begin_write(wanted.chunk);
    }
    Lent lent{wanted.chunk, wanted.num_tokens, {}, false, {}};
    const std::uint64_t bytes = wanted.num_tokens * parts_.bytes_per_token;
    std::string name;
    if (const auto place = parts_.store.land(wanted.chunk, bytes)) {
      lent.has_place = true;
      if (place->region == parts_.pool_region) {  // memory that can be taken back
        if (const auto grant = parts_.transport.grant(place->region, place->offset, bytes)) {
          lent.grant = *grant;
          if (auto exported = parts_.transport.export_grant(*grant)) name = std::move(*exported);
        }
      }
    }
    outcome.grants.push_back(std::move(name));
    lent_.emplace(LentKey{order.ticket, wanted.index}, std::move(lent));
  }
  completion_queue_.emplace_back(NodeMessage::kLendOutcome, encode(outcome));
}

void PushEngine::reclaim(const Revocation& order) {
  for (const RevokedChunk& chunk : order.chunks) {
    const LentKey key{order.ticket, chunk.index};
    const auto found = lent_.find(key);
    if (found == lent_.end()) continue;
    found->second.reclaim = chunk;
    give_back(key, found->second);
  }
}

/// Nobody may write the slot any more; then the store may bring the chunk to where it is read.
void PushEngine::give_back(const LentKey& key, Lent& lent) {
  if (lent.grant) {
    const Result<void> revoked = parts_.transport.revoke(*lent.grant);
    if (!revoked && revoked.error().code == ErrorCode::kFull) {
      revoking_.insert(key);
      return;
    }
    revoking_.erase(key);
    lent.grant.reset();
  }
  const std::uint32_t rank = parts_.core.rank();
  RevokedChunk& chunk = *lent.reclaim;
  chunk.ok = chunk.ok && rank < chunk.checksums.size();
  if (lent.has_place) landing_[lent.chunk] = key;
  const ChunkStore::Landed landed{lent.chunk, chunk.ok, chunk.ok ? chunk.checksums[rank] : 0};
  if (lent.has_place)
    parts_.store.landed({&landed, 1});
  else
    taken_back(key, false);
}

bool PushEngine::landed(const ChunkStore::Landed& chunk) {
  const std::lock_guard lock(mutex_);
  const auto found = landing_.find(chunk.chunk);
  if (found == landing_.end()) return false;
  const LentKey key = found->second;
  landing_.erase(found);
  taken_back(key, chunk.ok);
  return true;
}

void PushEngine::taken_back(const LentKey& key, bool ok) {
  const auto lent = lent_.find(key);
  RevokedChunk& back = *lent->second.reclaim;
  back.ok = back.ok && ok;
  {
    const std::lock_guard core_lock(parts_.core_mutex);
    parts_.core.end_write(back.chunk, back.ok);
  }
  Revocation& answer = taken_back_[key.first];
  answer.ticket = key.first;
  answer.rank = parts_.core.rank();
  answer.chunks.push_back(std::move(back));
  lent_.erase(lent);
}

bool PushEngine::progress(const Send& send) {
  std::vector<std::pair<NodeMessage, std::string>> out;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, index] : std::vector(full_.begin(), full_.end())) advance(id, index);
    for (const LentKey& key : std::vector(revoking_.begin(), revoking_.end())) give_back(key, lent_.at(key));
    out = std::exchange(completion_queue_, {});
    for (auto& [ticket, answer] : std::exchange(taken_back_, {}))
      out.emplace_back(NodeMessage::kReclaimed, encode(answer));
    std::erase_if(pushes_, [&](const auto& entry) {
      const auto is_over = [](const auto& item) { return item.second.is_over; };
      return dropped_.contains(entry.first) &&
             std::all_of(entry.second.items.begin(), entry.second.items.end(), is_over);
    });
  }
  for (const auto& [type, body] : out)
    send(scheduler_, encode(Envelope{kNodeWireVersion, static_cast<std::uint32_t>(type), 0, body}));
  return !out.empty();
}

bool PushEngine::is_waiting() const {
  const std::lock_guard lock(mutex_);
  return !full_.empty() || !revoking_.empty() || !landing_.empty();
}

}  // namespace kvferry
