#include "connector/runtime/worker/pusher.h"

#include <algorithm>

#include "connector/runtime/links/node_wire.h"
#include "transport/base/checksum.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

// Limit on dropped_; beyond this limit the push with the lowest number is removed.
constexpr std::size_t kDroppedMax = 4096;

}  // namespace

void Pusher::set_target(PushOrder order) {
  const std::lock_guard lock(mutex_);
  if (dropped_.contains(order.push)) return;
  const std::uint64_t id = order.push;
  Push& push = pushes_[id];
  push.order = std::move(order);
  for (const auto& [index, item] : push.items) advance(id, index);
}

void Pusher::start(const PushStart& start) {
  const std::lock_guard lock(mutex_);
  Item& item = item_of(start.push, start.index, start.chunk, start.num_tokens);
  const std::uint32_t rank = parts_.core.rank();
  item.is_saved = item.is_in_frame = item.is_whole = true;
  std::string refusal;
  if (!parts_.fits(start.chunk, start.num_tokens))
    refusal = fmt::format("pool slot {} does not exist or is too small for the chunk of {} tokens", start.chunk.slot,
                          start.num_tokens);
  else if (rank >= start.checksums.size())
    refusal = fmt::format("the order to push has no checksum of rank {}", rank);
  else
    item.checksum = start.checksums[rank];
  item.failed = !refusal.empty();
  if (item.failed && !item.transfer && !item.is_over)
    return end(start.push, start.index, item, {{}, ErrorCode::kInvalidArgument, refusal});
  advance(start.push, start.index);
}

void Pusher::drop(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  dropped_.insert(id);
  if (dropped_.size() > kDroppedMax) dropped_.erase(dropped_.begin());
  const auto found = pushes_.find(id);
  if (found == pushes_.end()) return;
  for (const auto& [index, item] : found->second.items) advance(id, index);
}

void Pusher::layer_saved(const SaveItem& save, std::uint32_t layer, std::uint64_t checksum) {
  {
    const std::lock_guard lock(mutex_);
    Item& item = item_of(save.push, save.push_index, save.chunk, save.num_tokens);
    if (item.layer_sums.size() != layer) return;  // an earlier layer is missing, so this layer is sent after the save
    item.layer_sums.push_back(checksum);
    advance(save.push, save.push_index);
  }
  wake_();
}

void Pusher::reached_frame(const SaveItem& save) {
  {
    const std::lock_guard lock(mutex_);
    item_of(save.push, save.push_index, save.chunk, save.num_tokens).is_in_frame = true;
    advance(save.push, save.push_index);
  }
  wake_();
}

void Pusher::begins_layers(const SaveItem& save) {
  {
    const std::lock_guard lock(mutex_);
    item_of(save.push, save.push_index, save.chunk, save.num_tokens);
  }
  wake_();
}

void Pusher::layers_in_frames(const FrameLayers& saved, const SendOutcome& send) {
  const std::set<ChunkRef> chunks(saved.chunks.begin(), saved.chunks.end());
  std::vector<LayersSaved> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, push] : pushes_) {
      LayersSaved told{id, parts_.core.rank(), {}, saved.done, saved.of};
      for (const auto& [index, item] : push.items)
        if (chunks.contains(item.chunk)) told.indices.push_back(index);
      if (!told.indices.empty()) all.push_back(std::move(told));
    }
  }
  for (const LayersSaved& told : all) send(seal(told.push, told));
}

void Pusher::saved(const SaveItem& save, bool ok, std::uint64_t checksum) {
  {
    const std::lock_guard lock(mutex_);
    Item& item = item_of(save.push, save.push_index, save.chunk, save.num_tokens);
    item.is_saved = item.is_in_frame = true;
    item.is_whole = ok;
    item.failed |= !ok;
    item.checksum = checksum;
    advance(save.push, save.push_index);
  }
  wake_();
}

Pusher::Item& Pusher::item_of(std::uint64_t push, std::uint32_t index, ChunkRef chunk, std::uint32_t num_tokens) {
  Item& item = pushes_[push].items[index];
  item.chunk = chunk;
  item.num_tokens = num_tokens;
  return item;
}

CopyRange Pusher::layers(const Item& item, std::uint32_t first, std::uint32_t end) const {
  const auto [offset, bytes] = parts_.layers(item.num_tokens, first, end);
  return {item.chunk.slot * parts_.slot_bytes + offset, offset, bytes};
}

/// Returns how many layers may be sent. The last layer is sent after the save has ended, because sending it ends the
/// transfer.
std::uint32_t Pusher::layers_ready(const Item& item) const {
  const auto num_layers = static_cast<std::uint32_t>(parts_.layer_bytes.size());
  return item.is_whole ? num_layers : std::min(static_cast<std::uint32_t>(item.layer_sums.size()), num_layers - 1);
}

/// Starts, feeds (adds saved layers to), cancels or ends the transfer of one chunk, as far as its state permits.
void Pusher::advance(std::uint64_t id, std::uint32_t index) {
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
    // While a save writes the slot, the chunk's push is not over; saved() ends it.
    if (item.ended.code == ErrorCode::kOk)
      item.ended = {{},
                    ErrorCode::kInternal,
                    push.is_dropped || item.is_whole ? "" : "its KV could not be saved in this node's pool"};
    if (item.is_saved) end(id, index, item, item.ended);
    return;
  }
  if (!push.order) return;
  if (index >= push.order->grants.size() || push.order->grants[index].empty()) {
    if (item.is_in_frame) end(id, index, item, {{}, ErrorCode::kRefused, ""});  // no slot was granted for the chunk
    return;
  }
  begin(push, id, index, item);
}

void Pusher::begin(Push& push, std::uint64_t id, std::uint32_t index, Item& item) {
  const std::uint32_t num_layers = layers_ready(item);
  if (num_layers == 0) return;
  PagedTransfer transfer{{}, Direction::kPush, parts_.pool_region, push.order->grants[index], {}, {}};
  if (item.is_whole) {
    transfer.ranges.push_back(layers(item, 0, num_layers));
    transfer.checksums.push_back(item.checksum);
  } else {
    transfer.is_fed = true;
    for (std::uint32_t layer = 0; layer < num_layers; ++layer) {
      transfer.ranges.push_back(layers(item, layer, layer + 1));
      transfer.checksums.push_back(item.layer_sums[layer]);
    }
  }
  const Result<TransferId> started = peers_.submit(push.order->remote_address, std::move(transfer));
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
    if (item.is_saved) end(id, index, item, {{}, started.error().code, started.error().what});
  }
}

/// Adds to the running transfer those saved layers that it does not have yet.
void Pusher::feed(Item& item) {
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
  if (parts_.transport.feed(*item.transfer, std::move(ranges), std::move(checksums), item.is_fed_whole)) return;
  item.failed = true;  // the transfer has failed already, or was cancelled here; its Completion follows in both cases
  parts_.transport.cancel(*item.transfer);
}

bool Pusher::completed(const Completion& completion, std::uint32_t limit_mb_per_s) {
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(completion.id);
  if (found == running_.end()) return false;
  const auto [id, index] = found->second;
  running_.erase(found);
  Item& item = pushes_.at(id).items.at(index);
  item.transfer.reset();
  const bool ok = completion.code == ErrorCode::kOk && item.is_fed_whole && !item.failed;
  item.failed |= !ok;
  item.ended = completion;
  item.limit_mb_per_s = limit_mb_per_s;
  if (!ok && completion.code == ErrorCode::kOk) item.ended.code = ErrorCode::kInternal;
  if (item.is_saved) end(id, index, item, item.ended);
  return true;
}

void Pusher::end(std::uint64_t id, std::uint32_t index, Item& item, const Completion& how) {
  const bool ok = how.code == ErrorCode::kOk;
  if (!how.what.empty() && !ok)
    log().warn("push {}: sending its chunk {} ({} tokens) to the decode node failed: {}", id, index, item.num_tokens,
               how.what);
  item.is_over = true;
  full_.erase({id, index});
  PushOutcome outcome{id, parts_.core.rank(), index, ok, ok ? "" : how.what};
  outcome.code = static_cast<std::uint8_t>(how.code);
  outcome.path = how.path;
  outcome.limit_mb_per_s = item.limit_mb_per_s;
  outcomes_.push_back(seal(0, outcome));
}

bool Pusher::progress(const SendOutcome& send) {
  std::vector<std::string> outcomes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, index] : std::set(full_)) advance(id, index);
    outcomes = std::exchange(outcomes_, {});
    std::erase_if(pushes_, [&](const auto& entry) {
      const auto is_over = [](const auto& item) { return item.second.is_over && item.second.is_saved; };
      return dropped_.contains(entry.first) &&
             std::all_of(entry.second.items.begin(), entry.second.items.end(), is_over);
    });
  }
  for (const std::string& outcome : outcomes) send(outcome);
  return !outcomes.empty();
}

bool Pusher::is_waiting() const {
  const std::lock_guard lock(mutex_);
  return !full_.empty();
}

}  // namespace kvferry
