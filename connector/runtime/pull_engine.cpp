#include "connector/runtime/pull_engine.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "connector/runtime/node_wire.h"
#include "connector/runtime/zmq_link.h"
#include "transport/base/clock.h"
#include "transport/base/log.h"
#include "transport/event_fd.h"

namespace kvferry {
namespace {

struct Running {
  PullOrder order;
  std::string reply_to;
  std::uint64_t message_id = 0;
};

}  // namespace

struct PullEngine::Impl {
  explicit Impl(PullEngineParts from) : parts(from) {}
  void run();
  bool take_orders();
  bool take_completions();
  void start_waiting();
  void give_up_overdue();
  void begin(Running running);
  void end(const Running& running, std::vector<bool> ok, std::string what);

  PullEngineParts parts;
  std::unique_ptr<ServerSocket> socket;
  EventFd wake;
  std::atomic<bool> stopping{false};
  std::thread thread;
  SteadyClock clock;
  std::map<TransferId, Running> running;
  std::vector<Running> waiting;  // the transport was full
};

PullEngine::PullEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PullEngine::~PullEngine() { shutdown(); }
const std::string& PullEngine::endpoint() const { return impl_->socket->endpoint(); }

Result<std::unique_ptr<PullEngine>> PullEngine::start(PullEngineParts parts) {
  auto impl = std::make_unique<Impl>(parts);
  // An abstract socket: no file that a killed process could leave behind.
  const std::string name = fmt::format("ipc://@kvferry-{}-{:x}", ::getpid(), std::random_device{}());
  auto socket = ServerSocket::bind(name);
  if (!socket) return std::move(socket).error();
  impl->socket = std::move(*socket);
  impl->thread = std::thread([raw = impl.get()] { raw->run(); });
  return std::unique_ptr<PullEngine>(new PullEngine(std::move(impl)));
}

void PullEngine::shutdown() {
  if (!impl_->thread.joinable()) return;
  impl_->stopping = true;
  impl_->wake.set();
  impl_->thread.join();
}

void PullEngine::Impl::run() {
  while (!stopping) {
    bool busy = take_orders();
    busy |= take_completions();
    start_waiting();
    give_up_overdue();
    if (busy) continue;
    pollfd fds[] = {{socket->fd(), POLLIN, 0}, {parts.transport.event_fd(), POLLIN, 0}, {wake.fd(), POLLIN, 0}};
    ::poll(fds, std::size(fds), running.empty() && waiting.empty() ? 200 : 20);
  }
}

bool PullEngine::Impl::take_orders() {
  bool busy = false;
  while (auto message = socket->receive()) {
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "worker message");
    if (!envelope || envelope->version != kNodeWireVersion ||
        envelope->type != static_cast<std::uint32_t>(NodeMessage::kPullOrder))
      continue;
    Result<PullOrder> order = decode<PullOrder>(envelope->body, "pull order");
    if (!order) continue;
    {
      const std::lock_guard lock(parts.core_mutex);
      parts.core.pull_ordered(*order, clock.now());
    }
    begin({std::move(*order), message->sender, envelope->id});
  }
  return busy;
}

void PullEngine::Impl::begin(Running pull) {
  const auto fail = [&](const Error& error) {
    end(pull, std::vector<bool>(pull.order.items.size(), false), error.what);
  };
  const Result<PeerId> peer = parts.transport.connect(pull.order.remote_address);
  if (!peer) return fail(peer.error());
  PagedTransfer transfer{*peer, Direction::kPull, parts.pool_region, pull.order.remote_region, {}, {}};
  std::uint32_t rank;
  {
    const std::lock_guard lock(parts.core_mutex);
    rank = parts.core.rank();
  }
  for (const PullItem& item : pull.order.items) {
    if (rank >= item.checksums.size())
      return fail(Error{ErrorCode::kCorrupt, fmt::format("a chunk without a checksum for rank {}", rank)});
    transfer.ranges.push_back({item.local.slot * parts.chunk_bytes, item.remote.slot * parts.chunk_bytes,
                               item.num_tokens * parts.bytes_per_token});
    transfer.checksums.push_back(item.checksums[rank]);
  }
  const Result<TransferId> id = parts.transport.submit(std::move(transfer));
  if (id) {
    running.emplace(*id, std::move(pull));
  } else if (id.error().code == ErrorCode::kFull) {
    waiting.push_back(std::move(pull));
  } else {
    fail(id.error());
  }
}

void PullEngine::Impl::start_waiting() {
  for (Running& pull : std::exchange(waiting, {})) begin(std::move(pull));
}

void PullEngine::Impl::give_up_overdue() {
  std::vector<std::uint64_t> overdue;
  {
    const std::lock_guard lock(parts.core_mutex);
    overdue = parts.core.overdue_pulls(clock.now());
  }
  for (const std::uint64_t pull : overdue) {
    for (const auto& [id, entry] : running) {
      if (entry.order.pull == pull) parts.transport.cancel(id);
    }
    const auto never_started =
        std::find_if(waiting.begin(), waiting.end(), [&](const Running& entry) { return entry.order.pull == pull; });
    if (never_started == waiting.end()) continue;
    const Running entry = std::move(*never_started);
    waiting.erase(never_started);
    end(entry, std::vector<bool>(entry.order.items.size(), false), "the transport stayed full until the deadline");
  }
}

bool PullEngine::Impl::take_completions() {
  const std::vector<Completion> completions = parts.transport.poll();
  for (const Completion& completion : completions) {
    const auto found = running.find(completion.id);
    if (found == running.end()) continue;
    const Running pull = std::move(found->second);
    running.erase(found);
    // The transport has compared each chunk's checksum while it was hot: the others of a corrupt transfer are good.
    const bool is_here = completion.code == ErrorCode::kOk || completion.code == ErrorCode::kCorrupt;
    std::vector<bool> ok(pull.order.items.size(), is_here);
    for (const std::uint32_t index : completion.corrupt_ranges) ok[index] = false;
    end(pull, std::move(ok), completion.what);
  }
  return !completions.empty();
}

void PullEngine::Impl::end(const Running& pull, std::vector<bool> ok, std::string what) {
  if (!what.empty()) log().warn("pull of {} chunks failed: {}", pull.order.items.size(), what);
  PullOutcome outcome;
  {
    const std::lock_guard lock(parts.core_mutex);
    outcome = parts.core.pull_ended(pull.order.pull, std::move(ok), std::move(what));
  }
  // The scheduler node lives as long as this worker does; if it is gone there is nobody left to tell.
  socket->send(pull.reply_to, seal(NodeMessage::kPullOutcome, pull.message_id, outcome));
}

}  // namespace kvferry
