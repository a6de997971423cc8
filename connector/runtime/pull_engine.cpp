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

struct Pull {
  PullOrder order;
  std::string reply_to;
  std::uint64_t message_id = 0;
  std::vector<bool> ok;      // [item]
  std::size_t num_left = 0;  // items whose outcome is open
  std::string what;
};
using PullPtr = std::shared_ptr<Pull>;

/// The items of a pull that land in one region: a transfer.
struct Piece {
  PullPtr pull;
  RegionId region;
  std::vector<std::size_t> items;
  std::vector<std::uint64_t> offsets;  // in the region
};

}  // namespace

struct PullEngine::Impl {
  explicit Impl(PullEngineParts from) : parts(from), rank(from.core.rank()) {}
  void run();
  bool take_orders();
  bool take_completions();
  bool take_landed();
  void start_waiting();
  void give_up_overdue();
  void begin(PullPtr pull);
  void submit(Piece piece);
  void close(const Piece& piece, const std::vector<bool>& ok, const std::string& what);
  void fail(const Piece& piece, const std::string& what) {
    close(piece, std::vector<bool>(piece.items.size(), false), what);
  }
  void settle(Pull& pull, std::size_t item, bool ok);
  void end(Pull& pull);

  PullEngineParts parts;
  const std::uint32_t rank;
  std::unique_ptr<ServerSocket> socket;
  EventFd wake;
  std::atomic<bool> stopping{false};
  std::thread thread;
  SteadyClock clock;
  std::map<TransferId, Piece> running;
  std::vector<Piece> waiting;                                   // the transport was full
  std::map<ChunkRef, std::pair<PullPtr, std::size_t>> landing;  // here, but not yet where others may read them
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
    busy |= take_landed();
    start_waiting();
    give_up_overdue();
    if (busy) continue;
    pollfd fds[] = {{socket->fd(), POLLIN, 0}, {parts.transport.event_fd(), POLLIN, 0}, {wake.fd(), POLLIN, 0}};
    const int patience_ms = !landing.empty() ? 1 : !running.empty() || !waiting.empty() ? 20 : 200;
    ::poll(fds, std::size(fds), patience_ms);
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
    const std::size_t num_items = order->items.size();
    begin(std::make_shared<Pull>(
        Pull{std::move(*order), message->sender, envelope->id, std::vector<bool>(num_items, false), num_items, {}}));
  }
  return busy;
}

/// Asks where each chunk lands, and starts a transfer for each region.
void PullEngine::Impl::begin(PullPtr pull) {
  if (pull->order.items.empty()) return end(*pull);
  std::map<RegionId, Piece> pieces;
  for (std::size_t i = 0; i < pull->order.items.size(); ++i) {
    const PullItem& item = pull->order.items[i];
    if (rank >= item.checksums.size()) {
      pull->what = fmt::format("a chunk without a checksum for rank {}", rank);
      settle(*pull, i, false);
      continue;
    }
    const Result<ChunkStore::Place> place = parts.store.land(item.local, item.num_tokens * parts.bytes_per_token);
    if (!place) {
      pull->what = place.error().what;
      settle(*pull, i, false);
      continue;
    }
    Piece& piece = pieces[place->region];
    piece.pull = pull;
    piece.region = place->region;
    piece.items.push_back(i);
    piece.offsets.push_back(place->offset);
  }
  for (auto& [region, piece] : pieces) submit(std::move(piece));
}

void PullEngine::Impl::submit(Piece piece) {
  const PullOrder& order = piece.pull->order;
  const Result<PeerId> peer = parts.transport.connect(order.remote_address);
  if (!peer) return fail(piece, peer.error().what);
  PagedTransfer transfer{*peer, Direction::kPull, piece.region, order.remote_region, {}, {}};
  for (std::size_t i = 0; i < piece.items.size(); ++i) {
    const PullItem& item = order.items[piece.items[i]];
    transfer.ranges.push_back(
        {piece.offsets[i], item.remote.slot * parts.chunk_bytes, item.num_tokens * parts.bytes_per_token});
    transfer.checksums.push_back(item.checksums[rank]);
  }
  const Result<TransferId> id = parts.transport.submit(std::move(transfer));
  if (id) {
    running.emplace(*id, std::move(piece));
  } else if (id.error().code == ErrorCode::kFull) {
    waiting.push_back(std::move(piece));
  } else {
    fail(piece, id.error().what);
  }
}

void PullEngine::Impl::start_waiting() {
  for (Piece& piece : std::exchange(waiting, {})) submit(std::move(piece));
}

void PullEngine::Impl::give_up_overdue() {
  std::vector<std::uint64_t> overdue;
  {
    const std::lock_guard lock(parts.core_mutex);
    overdue = parts.core.overdue_pulls(clock.now());
  }
  for (const std::uint64_t pull : overdue) {
    for (const auto& [id, piece] : running) {
      if (piece.pull->order.pull == pull) parts.transport.cancel(id);
    }
    for (Piece& piece : std::exchange(waiting, {})) {
      if (piece.pull->order.pull == pull)
        fail(piece, "the transport stayed full until the deadline");
      else
        waiting.push_back(std::move(piece));
    }
  }
}

bool PullEngine::Impl::take_completions() {
  const std::vector<Completion> completions = parts.transport.poll();
  for (const Completion& completion : completions) {
    const auto found = running.find(completion.id);
    if (found == running.end()) continue;
    const Piece piece = std::move(found->second);
    running.erase(found);
    // The transport has compared each chunk's checksum while it was hot: the others of a corrupt transfer are good.
    const bool is_here = completion.code == ErrorCode::kOk || completion.code == ErrorCode::kCorrupt;
    std::vector<bool> ok(piece.items.size(), is_here);
    for (const std::uint32_t index : completion.corrupt_ranges) ok[index] = false;
    close(piece, ok, completion.what);
  }
  return !completions.empty();
}

/// The piece's memory is quiet. The store may still have to bring the chunks to where others read them.
void PullEngine::Impl::close(const Piece& piece, const std::vector<bool>& ok, const std::string& what) {
  if (!what.empty()) piece.pull->what = what;
  std::vector<ChunkStore::Landed> landed;
  for (std::size_t i = 0; i < piece.items.size(); ++i) {
    const PullItem& item = piece.pull->order.items[piece.items[i]];
    landing[item.local] = {piece.pull, piece.items[i]};
    landed.push_back({item.local, ok[i], item.checksums[rank]});
  }
  parts.store.landed(landed);
}

bool PullEngine::Impl::take_landed() {
  if (landing.empty()) return false;
  const std::vector<ChunkStore::Landed> landed = parts.store.take_landed();
  for (const ChunkStore::Landed& chunk : landed) {
    const auto found = landing.find(chunk.chunk);
    if (found == landing.end()) continue;
    const auto [pull, item] = std::move(found->second);
    landing.erase(found);
    settle(*pull, item, chunk.ok);
  }
  return !landed.empty();
}

void PullEngine::Impl::settle(Pull& pull, std::size_t item, bool ok) {
  pull.ok[item] = ok;
  if (--pull.num_left == 0) end(pull);
}

void PullEngine::Impl::end(Pull& pull) {
  if (!pull.what.empty()) log().warn("pull of {} chunks failed: {}", pull.order.items.size(), pull.what);
  PullOutcome outcome;
  {
    const std::lock_guard lock(parts.core_mutex);
    outcome = parts.core.pull_ended(pull.order.pull, std::move(pull.ok), std::move(pull.what));
  }
  // The scheduler node lives as long as this worker does; if it is gone there is nobody left to tell.
  socket->send(pull.reply_to, seal(NodeMessage::kPullOutcome, pull.message_id, outcome));
}

}  // namespace kvferry
