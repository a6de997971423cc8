// PushSender's announcements of layers.
#include <algorithm>
#include <utility>

#include "connector/core/promises.h"
#include "connector/core/push/push_sender.h"

namespace kvferry {

void PushSender::layers_saved(const LayersSaved& saved) {
  const auto found = pushes_.find(saved.push);
  if (found == pushes_.end() || saved.rank >= parts_.config.num_ranks) return;
  Push& push = found->second;
  PushProgress progress{push.reservation, {}, saved.done, saved.of};
  for (const std::uint32_t index : saved.indices) {
    if (index >= push.items.size()) continue;
    Item& item = push.items[index];
    item.layers_done.resize(parts_.config.num_ranks);
    item.layers_done[saved.rank] = saved.done;
    const std::uint32_t done = *std::ranges::min_element(item.layers_done);
    if (!push.is_answered || push.is_dropped || !push.takes_layers || !item.is_growing() || done <= item.layers_told)
      continue;
    progress.indices.push_back(index);
    progress.done = std::min(progress.done, done);
  }
  if (progress.indices.empty()) return;
  for (const std::uint32_t index : progress.indices) {
    Item& item = push.items[index];
    promise::verified_only_in_all_frames(progress.done, item.layers_done, item.chunk.slot);
    item.layers_told = progress.done;
  }
  parts_.actions.push_back(AnnounceLayers{push.endpoint, std::move(progress)});
}

bool PushSender::is_growing(std::uint64_t id, const ChunkKey& key, ChunkRef chunk) const {
  const auto push = pushes_.find(id);
  const auto places = waiting_.find(key);
  if (push == pushes_.end() || push->second.is_dropped || places == waiting_.end()) return false;
  return std::ranges::any_of(places->second, [&](const Tag place) {
    if (place.push != id) return false;
    const Item& item = push->second.items[place.index];
    return item.is_growing() && item.layers_told > 0 && item.chunk == chunk;
  });
}

}  // namespace kvferry
