#include "connector/runtime/worker/service_loop.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "connector/runtime/links/node_wire.h"
#include "transport/base/log.h"

namespace kvferry {

Result<std::unique_ptr<ServiceLoop>> ServiceLoop::start(const WorkerParts& parts) {
  // The socket is an abstract Unix socket, so that a killed process leaves no file behind.
  auto socket =
      KVFERRY_TRY(ServerSocket::bind(fmt::format("ipc://@kvferry-{}-{:x}", ::getpid(), std::random_device{}())));
  std::unique_ptr<ServiceLoop> made(new ServiceLoop(parts, std::move(socket)));
  made->loop_.start([self = made.get()](std::vector<pollfd>& fds) { return self->turn(fds); });
  return made;
}

int ServiceLoop::turn(std::vector<pollfd>& fds) {
  bool busy = take_orders();
  busy |= take_completions();
  busy |= take_landed();
  busy |= take_layers();
  busy |= pusher_.progress(send_);
  busy |= slots_.progress();
  busy |= hasher_.progress();
  puller_.progress();
  peers_.expire();
  if (busy) return 0;
  fds.push_back({socket_->fd(), POLLIN, 0});
  fds.push_back({parts_.transport.event_fd(), POLLIN, 0});
  const bool is_short =
      puller_.is_landing() || pusher_.is_waiting() || slots_.is_waiting() || parts_.store.is_saving_layers();
  return is_short ? 1 : puller_.is_busy() ? 20 : 200;
}

bool ServiceLoop::take_orders() {
  bool busy = false;
  while (auto message = socket_->receive()) {
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "order");
    if (!envelope || envelope->version != kNodeWireVersion) continue;
    Result<WorkerOrder> order = unseal<WorkerOrder>(*envelope);
    if (!order) {
      log().error("an order of this server's scheduler node is ignored: {}", order.error().what);
      continue;
    }
    scheduler_ = std::move(message->sender);
    std::visit(Overloaded{
                   [&](PullOrder& pull) { puller_.start(std::move(pull)); },
                   [&](const PullProgress& pull) { puller_.grow(pull); },
                   [&](ChecksumOrder& checksums) { hasher_.start(std::move(checksums)); },
                   [&](PushOrder& push) { pusher_.set_target(std::move(push)); },
                   [&](const PushStart& push) { pusher_.start(push); },
                   [&](const PushDrop& push) { pusher_.drop(push.value); },
                   [&](const GrantOrder& grants) { slots_.grant(grants); },
                   [&](const Revocation& grants) { slots_.revoke(grants); },
                   [&](const FramePinOrder& leased) { pin_frames(leased); },
                   [&](const FrameUnpin& lease) { parts_.store.unpin_frames(lease.value); },
               },
               *order);
  }
  return busy;
}

void ServiceLoop::pin_frames(const FramePinOrder& order) {
  constexpr std::int64_t kTimeoutMaxMs = 24 * 3600 * 1000;
  const TimeNs timeout = std::clamp<std::int64_t>(order.timeout_ms, 0, kTimeoutMaxMs) * kMillisecond;
  FramePinOutcome outcome{
      order.lease, order.rank,
      parts_.store.pin_frames(order.lease, order.chunks, parts_.clock.now() + timeout, order.are_growing)};
  send_(seal(order.lease, outcome));
}

bool ServiceLoop::take_completions() {
  const std::vector<Completion> completions = parts_.transport.poll();
  for (const Completion& completion : completions) {
    const std::uint32_t limit_mb_per_s = peers_.completed(completion);
    if (!puller_.completed(completion, limit_mb_per_s)) pusher_.completed(completion, limit_mb_per_s);
  }
  return !completions.empty();
}

bool ServiceLoop::take_landed() {
  const std::vector<ChunkStore::Landed> landed = parts_.store.take_landed();
  for (const ChunkStore::Landed& chunk : landed)
    if (!puller_.landed(chunk)) slots_.landed(chunk);
  return !landed.empty();
}

bool ServiceLoop::take_layers() {
  const std::vector<ChunkStore::SavedLayers> saved = parts_.store.take_layers();
  const auto num_layers = static_cast<std::uint32_t>(parts_.layer_bytes.size());
  for (const ChunkStore::SavedLayers& layers : saved)
    pusher_.layers_in_frames({layers.chunks, layers.num_layers * parts_.layer_groups / num_layers, parts_.layer_groups},
                             send_);
  return !saved.empty();
}

}  // namespace kvferry
