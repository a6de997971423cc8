// What a WorkerNode does in the engine's steps.
#include <algorithm>
#include <utility>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/worker/worker_node.h"
#include "transport/base/log.h"

namespace kvferry {

Result<void> WorkerNode::begin_step(std::string_view bytes, DeviceStream stream) {
  plan_ = KVFERRY_TRY(decode<StepPlan>(bytes, "step plan"));
  wants_layers_ = !options_.gpu || options_.config.push_layers > 0;
  layers_done_ = 0;
  const auto has_push = [](const SaveJob& job) {
    return std::any_of(job.items.begin(), job.items.end(), [](const SaveItem& item) { return item.push != 0; });
  };
  wants_layers_ &= std::any_of(plan_.saves_after.begin(), plan_.saves_after.end(), has_push);
  core_.locked([&](WorkerCore& core) { core.begin_step(plan_.step); });
  save_all(std::exchange(plan_.saves_before, {}), stream);
  if (options_.gpu) begin_loads(stream);
  return {};
}

void WorkerNode::load(DeviceStream stream) {
  if (!options_.gpu) begin_loads(stream);
}

void WorkerNode::begin_loads(DeviceStream stream) {
  for (const LoadJob& job : std::exchange(plan_.ahead, {})) store_->begin_ahead(job);
  for (const LoadJob& job : std::exchange(plan_.abandoned, {})) {
    store_->drop_ahead(job);
    finished_loads_.emplace_back(job.request_id, false);
    core_.locked([&](WorkerCore& core) { core.loaded(job, {}); });
  }
  std::vector<LoadJob> jobs = std::exchange(plan_.loads, {});
  // On a GPU a synchronous load fails: the forward pass would read its blocks before the GPU has verified them.
  for (const LoadJob& job : jobs)
    if (options_.gpu && !job.is_async) loaded(job, {});
  if (options_.gpu) std::erase_if(jobs, [](const LoadJob& job) { return !job.is_async; });
  const auto is_readable = [&](ChunkRef chunk) { return core_.loadable(chunk); };
  if (!jobs.empty()) store_->load(std::move(jobs), is_readable, stream);
  if (!options_.gpu) take_loaded();
  store_->unpack_ahead(is_readable, [&](ChunkRef chunk) {
    return core_.locked([&](const WorkerCore& core) { return core.arriving(chunk); });
  });
}

void WorkerNode::take_loaded() {
  for (ChunkStore::Loaded& load : store_->take_loaded()) loaded(load.job, std::move(load.outcome));
}

std::vector<WorkerNode::FinishedLoad> WorkerNode::take_finished_loads() {
  take_loaded();
  return std::exchange(finished_loads_, {});
}

void WorkerNode::save_layer(std::uint32_t layer, DeviceStream stream) {
  if (!wants_layers_) return;
  if (options_.gpu) return save_layer_on_gpu(layer, stream);
  for (const SaveJob& job : plan_.saves_after) {
    for (const SaveItem& item : job.items) {
      if (item.push == 0) continue;
      if (begun_.insert(item.chunk).second) core_.locked([&](WorkerCore& core) { core.begin_write(item.chunk); });
      // If save_layer() fails, save() packs the whole chunk and reports the outcome.
      if (const auto checksum = store_->save_layer(job, item, layer))
        service_->pusher().layer_saved(item, layer, *checksum);
    }
  }
}

/// Packs the layers up to this one if a group of layers ends with it. The last group is packed by save().
void WorkerNode::save_layer_on_gpu(std::uint32_t layer, DeviceStream stream) {
  if (layer != layers_done_) {  // the engine computes the layers in another order, so the rest is packed by save()
    wants_layers_ = false;
    return;
  }
  layers_done_ += 1;
  const std::uint64_t groups = options_.config.push_layers, num_layers = options_.shard.num_layers;
  if (layers_done_ * groups / num_layers == layer * groups / num_layers || layers_done_ == num_layers) return;
  const auto begin = [&](const SaveItem& item) {
    if (!begun_.insert(item.chunk).second) return;
    core_.locked([&](WorkerCore& core) { core.begin_write(item.chunk); });
    if (item.push != 0) service_->pusher().begins_layers(item);
  };
  for (const SaveJob& job : plan_.saves_after) std::ranges::for_each(job.items, begin);
  store_->save_layers(plan_.saves_after, layers_done_, stream);
}

void WorkerNode::save_all(const std::vector<SaveJob>& jobs, DeviceStream stream) {
  if (jobs.empty()) return;
  core_.locked([&](WorkerCore& core) {
    for (const SaveJob& job : jobs)
      for (const SaveItem& item : job.items) {
        if (begun_.erase(item.chunk) == 0) core.begin_write(item.chunk);
        if (item.push != 0) pushed_.emplace(item.chunk, item);
      }
  });
  store_->save(jobs, stream);
  take_saved();
}

void WorkerNode::take_saved() {
  const std::vector<SaveDone> saved = store_->take_saved();
  core_.locked([&](WorkerCore& core) {
    for (const SaveDone& save : saved) core.saved(save);
  });
  for (const SaveDone& save : saved) {
    const auto push = pushed_.find(save.chunk);
    if (push == pushed_.end()) continue;
    if (save.is_in_frame) {
      service_->pusher().reached_frame(push->second);
    } else {
      service_->pusher().saved(push->second, save.ok, save.checksum);
      pushed_.erase(push);
    }
  }
}

void WorkerNode::loaded(const LoadJob& job, LoadOutcome outcome) {
  std::uint32_t wanted = 0;
  for (const LoadItem& item : job.items) wanted += item.num_tokens;
  const bool is_whole = outcome.tokens_loaded == wanted;
  if (!is_whole) {
    log().warn("request {}: loaded {} of {} tokens; {}", job.request_id, outcome.tokens_loaded, wanted,
               job.is_async ? "none of these are used, because an asynchronous load must be complete"
                            : "the rest is computed again");
  }
  if (job.is_async) {
    finished_loads_.emplace_back(job.request_id, is_whole);
  } else if (!is_whole) {
    const std::uint32_t first_bad = job.items.front().first_token + outcome.tokens_loaded;
    const std::vector<BlockId>& blocks = job.block_ids.front();  // with several KV groups, loads are asynchronous
    failed_blocks_.insert(failed_blocks_.end(), blocks.begin() + first_bad / options_.layouts[0].block_tokens,
                          blocks.end());
  }
  core_.locked([&](WorkerCore& core) { core.loaded(job, std::move(outcome)); });
}

std::optional<std::string> WorkerNode::take_report() {
  take_saved();
  const std::optional<WorkerReport> report = core_.locked([&](WorkerCore& core) {
    core.accesses_refused(transport_->num_refused());
    return core.take_report();
  });
  if (!report) return std::nullopt;
  return encode(*report);
}

}  // namespace kvferry
