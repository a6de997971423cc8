#include "connector/runtime/worker/service_loop.h"

#include <unistd.h>

#include <random>
#include <utility>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/links/zmq_link.h"
#include "connector/runtime/poll_loop.h"
#include "connector/runtime/worker/puller.h"
#include "connector/runtime/worker/run_hasher.h"
#include "connector/runtime/worker/slot_grants.h"
#include "transport/base/log.h"

namespace kvferry {

struct ServiceLoop::Impl {
  Impl(const WorkerParts& from, std::unique_ptr<ServerSocket> bound)
      : parts(from),
        peers(parts.transport, parts.clock),
        socket(std::move(bound)),
        send([this](const std::string& bytes) { socket->send(scheduler, bytes); }),
        puller(parts, peers, send),
        pusher(parts, peers, [this] { loop.wake(); }),
        slots(parts, send),
        hasher(parts, send) {}

  int turn(std::vector<pollfd>& fds);
  bool take_orders();
  bool take_completions();
  bool take_landed();

  WorkerParts parts;
  TransportPeers peers;
  std::unique_ptr<ServerSocket> socket;
  std::string scheduler;  // sender of the last order; gets the outcomes
  SendOutcome send;
  Puller puller;
  Pusher pusher;
  SlotGrants slots;
  RunHasher hasher;
  PollLoop loop;
};

ServiceLoop::ServiceLoop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ServiceLoop::~ServiceLoop() { shutdown(); }
const std::string& ServiceLoop::endpoint() const { return impl_->socket->endpoint(); }
Pusher& ServiceLoop::pusher() { return impl_->pusher; }
void ServiceLoop::shutdown() { impl_->loop.stop(); }

Result<std::unique_ptr<ServiceLoop>> ServiceLoop::start(const WorkerParts& parts) {
  // An abstract socket: a killed process leaves no file behind.
  auto socket = ServerSocket::bind(fmt::format("ipc://@kvferry-{}-{:x}", ::getpid(), std::random_device{}()));
  if (!socket) return std::move(socket).error();
  auto impl = std::make_unique<Impl>(parts, std::move(*socket));
  impl->loop.start([raw = impl.get()](std::vector<pollfd>& fds) { return raw->turn(fds); });
  return std::unique_ptr<ServiceLoop>(new ServiceLoop(std::move(impl)));
}

int ServiceLoop::Impl::turn(std::vector<pollfd>& fds) {
  bool busy = take_orders();
  busy |= take_completions();
  busy |= take_landed();
  busy |= pusher.progress(send);
  busy |= slots.progress();
  busy |= hasher.progress();
  puller.progress();
  peers.expire();
  if (busy) return 0;
  fds.push_back({socket->fd(), POLLIN, 0});
  fds.push_back({parts.transport.event_fd(), POLLIN, 0});
  const bool is_short = puller.is_landing() || pusher.is_waiting() || slots.is_waiting();
  return is_short ? 1 : puller.is_busy() ? 20 : 200;
}

bool ServiceLoop::Impl::take_orders() {
  bool busy = false;
  while (auto message = socket->receive()) {
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "order");
    if (!envelope || envelope->version != kNodeWireVersion) continue;
    Result<WorkerOrder> order = unseal<WorkerOrder>(*envelope);
    if (!order) {
      log().error("ignoring an order from the scheduler node: {}", order.error().what);
      continue;
    }
    scheduler = std::move(message->sender);
    std::visit(Overloaded{
                   [&](PullOrder& pull) { puller.start(std::move(pull)); },
                   [&](ChecksumOrder& checksums) { hasher.start(std::move(checksums)); },
                   [&](PushOrder& push) { pusher.set_target(std::move(push)); },
                   [&](const PushStart& push) { pusher.start(push); },
                   [&](const PushDrop& push) { pusher.drop(push.value); },
                   [&](const GrantOrder& grants) { slots.grant(grants); },
                   [&](const Revocation& grants) { slots.revoke(grants); },
               },
               *order);
  }
  return busy;
}

bool ServiceLoop::Impl::take_completions() {
  const std::vector<Completion> completions = parts.transport.poll();
  for (const Completion& completion : completions) {
    peers.completed(completion);
    if (!puller.completed(completion)) pusher.completed(completion);
  }
  return !completions.empty();
}

bool ServiceLoop::Impl::take_landed() {
  const std::vector<ChunkStore::Landed> landed = parts.store.take_landed();
  for (const ChunkStore::Landed& chunk : landed)
    if (!puller.landed(chunk)) slots.landed(chunk);
  return !landed.empty();
}

}  // namespace kvferry
