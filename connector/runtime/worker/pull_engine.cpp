#include "connector/runtime/worker/pull_engine.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "connector/runtime/worker/run_hasher.h"
#include "connector/runtime/links/zmq_link.h"
#include "transport/base/checksum.h"
#include "transport/base/clock.h"
#include "transport/base/log.h"
#include "transport/event_fd.h"

namespace kvferry {
namespace {

struct Pull {
  Pull(PullOrder from, std::string sender, std::uint64_t id)
      : order(std::move(from)), reply_to(std::move(sender)), message_id(id), num_left(order.items.size()) {
    ok.resize(num_left, false);
    checksums.resize(num_left, 0);
    num_pieces.resize(num_left, 0);
  }
  /// Whether the holder's shape is another: chunks are put together from runs.
  bool has_runs() const { return !order.sources.empty(); }

  PullOrder order;
  std::string reply_to;
  std::uint64_t message_id = 0;
  std::size_t num_left = 0;               // items whose outcome is open
  std::vector<bool> ok;                   // [item]; false from the first piece on that failed
  std::vector<std::uint64_t> checksums;   // [item]
  std::vector<std::uint32_t> num_pieces;  // [item] that are under way
  std::string what;
};
using PullPtr = std::shared_ptr<Pull>;

/// What a pull reads of one source into one region: a transfer.
struct Piece {
  PullPtr pull;
  std::string address, remote_region;
  RegionId region;
  std::vector<CopyRange> ranges;
  std::vector<std::uint64_t> checksums;  // [range]
  std::vector<std::size_t> items;        // [range]
};

}  // namespace

struct PullEngine::Impl {
  explicit Impl(PullEngineParts from)
      : parts(from),
        rank(from.core.rank()),
        hasher(from.pool, from.chunk_bytes, from.bytes_per_token, [this](ChunkRef c) {
          const std::lock_guard lock(parts.core_mutex);
          return parts.core.readable(c);
        }) {}
  void run();
  bool take_orders();
  bool take_completions();
  bool take_landed();
  void start_waiting();
  void give_up_overdue();
  void begin(PullPtr pull);
  void submit(Piece piece);
  void close(const Piece& piece, const std::vector<bool>& ok, const std::string& what);  // ok: [range]
  void fail(const Piece& piece, const std::string& what) {
    close(piece, std::vector<bool>(piece.ranges.size(), false), what);
  }
  void settle(Pull& pull, std::size_t item, bool ok);
  Result<void> plan(const PullPtr& pull, std::size_t item, std::map<std::pair<RegionId, std::uint32_t>, Piece>& pieces);
  std::uint64_t checksum_of(const Pull& pull, std::size_t item) const;
  void end(Pull& pull);

  PullEngineParts parts;
  const std::uint32_t rank;
  RunHasher hasher;
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
  parts.pushes.on_news = [raw = impl.get()] { raw->wake.set(); };
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
  const auto send = [&](const std::string& to, const std::string& bytes) { socket->send(to, bytes); };
  while (!stopping) {
    wake.clear();
    bool busy = take_orders();
    busy |= take_completions();
    busy |= take_landed();
    busy |= parts.pushes.progress(send);
    busy |= hasher.step(*socket, clock.now());
    start_waiting();
    give_up_overdue();
    if (busy) continue;
    pollfd fds[] = {{socket->fd(), POLLIN, 0}, {parts.transport.event_fd(), POLLIN, 0}, {wake.fd(), POLLIN, 0}};
    const bool is_short = !landing.empty() || parts.pushes.is_waiting();
    const int patience_ms = is_short ? 1 : !running.empty() || !waiting.empty() ? 20 : 200;
    ::poll(fds, std::size(fds), patience_ms);
  }
}

bool PullEngine::Impl::take_orders() {
  bool busy = false;
  while (auto message = socket->receive()) {
    busy = true;
    const Result<Envelope> envelope = decode<Envelope>(message->bytes, "worker message");
    if (!envelope || envelope->version != kNodeWireVersion || parts.pushes.take(message->sender, *envelope)) continue;
    if (envelope->type == static_cast<std::uint32_t>(NodeMessage::kChecksumOrder))
      hasher.take(message->sender, *envelope, clock.now());
    if (envelope->type != static_cast<std::uint32_t>(NodeMessage::kPullOrder)) continue;
    Result<PullOrder> order = decode<PullOrder>(envelope->body, "pull order");
    if (!order) continue;
    {
      const std::lock_guard lock(parts.core_mutex);
      parts.core.pull_ordered(*order, clock.now());
    }
    begin(std::make_shared<Pull>(std::move(*order), message->sender, envelope->id));
  }
  return busy;
}

/// Asks where each chunk lands, and starts a transfer for each region and source.
void PullEngine::Impl::begin(PullPtr pull) {
  if (pull->order.items.empty()) return end(*pull);
  std::map<std::pair<RegionId, std::uint32_t>, Piece> pieces;
  for (std::size_t i = 0; i < pull->order.items.size(); ++i) {
    if (const Result<void> planned = plan(pull, i, pieces); !planned) {
      pull->what = planned.error().what;
      settle(*pull, i, false);
    }
  }
  for (auto& [place, piece] : pieces) submit(std::move(piece));
}

Result<void> PullEngine::Impl::plan(const PullPtr& pull, std::size_t index,
                                    std::map<std::pair<RegionId, std::uint32_t>, Piece>& pieces) {
  const PullOrder& order = pull->order;
  const PullItem& item = order.items[index];
  const std::uint64_t bytes = item.num_tokens * parts.bytes_per_token;
  const PullSource only{order.remote_address, order.remote_region, parts.chunk_bytes};
  const ShardRun all{0, 0, 0, 1};
  const std::uint64_t cell_bytes = pull->has_runs() ? bytes / order.num_cells : bytes;
  const std::span<const PullSource> sources = pull->has_runs() ? std::span(order.sources) : std::span(&only, 1);
  const std::span<const ShardRun> runs = pull->has_runs() ? std::span(order.runs) : std::span(&all, 1);
  std::vector<std::uint64_t> checksums;
  if (!pull->has_runs() && rank < item.checksums.size()) checksums.push_back(item.checksums[rank]);
  if (pull->has_runs() && !item.run_checksums.empty()) checksums = item.run_checksums[0];
  if (checksums.size() != runs.size())
    return Error{ErrorCode::kInvalidArgument, fmt::format("a chunk without a checksum for rank {}", rank)};
  const Result<ChunkStore::Place> place =
      pull->has_runs() ? parts.store.land_in_slot(item.local, bytes) : parts.store.land(item.local, bytes);
  if (!place) return place.error();
  pull->ok[index] = true;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const ShardRun& run = runs[r];
    const PullSource& source = sources[run.holder];
    Piece& piece = pieces[{place->region, run.holder}];
    if (piece.items.empty() || piece.items.back() != index) pull->num_pieces[index] += 1;
    piece.pull = pull;
    piece.address = source.address;
    piece.remote_region = source.region;
    piece.region = place->region;
    piece.ranges.push_back({place->offset + run.target * cell_bytes,
                            item.remote.slot * source.slot_bytes + run.source * cell_bytes, run.cells * cell_bytes});
    piece.checksums.push_back(checksums[r]);
    piece.items.push_back(index);
  }
  return {};
}

void PullEngine::Impl::submit(Piece piece) {
  const Result<PeerId> peer = parts.transport.connect(piece.address);
  if (!peer) return fail(piece, peer.error().what);
  PagedTransfer transfer{*peer, Direction::kPull, piece.region, piece.remote_region, piece.ranges, {}};
  transfer.checksums = piece.checksums;
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
    if (found == running.end()) {
      parts.pushes.completed(completion);
      continue;
    }
    const Piece piece = std::move(found->second);
    running.erase(found);
    // The transport has compared each range's checksum while it was hot: the others of a corrupt transfer are good.
    const bool is_here = completion.code == ErrorCode::kOk || completion.code == ErrorCode::kCorrupt;
    std::vector<bool> ok(piece.ranges.size(), is_here);
    for (const std::uint32_t index : completion.corrupt_ranges) ok[index] = false;
    close(piece, ok, completion.what);
  }
  return !completions.empty();
}

/// The piece's memory is quiet, and that of a chunk when all its pieces are. The store may still have to bring the
/// chunks to where others read them.
void PullEngine::Impl::close(const Piece& piece, const std::vector<bool>& ok, const std::string& what) {
  Pull& pull = *piece.pull;
  if (!what.empty()) pull.what = what;
  std::vector<ChunkStore::Landed> landed;
  for (std::size_t r = 0; r < piece.items.size(); ++r) {
    const std::size_t index = piece.items[r];
    if (!ok[r]) pull.ok[index] = false;
    const bool is_last_range = r + 1 == piece.items.size() || piece.items[r + 1] != index;
    if (!is_last_range || --pull.num_pieces[index] > 0) continue;
    const ChunkRef chunk = pull.order.items[index].local;
    if (pull.ok[index]) pull.checksums[index] = checksum_of(pull, index);
    landing[chunk] = {piece.pull, index};
    landed.push_back({chunk, pull.ok[index], pull.checksums[index]});
  }
  if (!landed.empty()) parts.store.landed(landed);
}

/// That of a chunk whose bytes are here and verified.
std::uint64_t PullEngine::Impl::checksum_of(const Pull& pull, std::size_t index) const {
  const PullItem& item = pull.order.items[index];
  if (!pull.has_runs()) return item.checksums[rank];
  if (pull.order.runs.size() == 1) return item.run_checksums[0][0];
  return chunk_checksum(
      parts.pool.subspan(item.local.slot * parts.chunk_bytes, item.num_tokens * parts.bytes_per_token));
}

bool PullEngine::Impl::take_landed() {
  const std::vector<ChunkStore::Landed> landed = parts.store.take_landed();
  for (const ChunkStore::Landed& chunk : landed) {
    const auto found = landing.find(chunk.chunk);
    if (found == landing.end()) {
      parts.pushes.landed(chunk);
      continue;
    }
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
  if (pull.has_runs()) outcome.checksums = std::move(pull.checksums);
  // The scheduler node lives as long as this worker does; if it is gone there is nobody left to tell.
  socket->send(pull.reply_to, seal(NodeMessage::kPullOutcome, pull.message_id, outcome));
}

}  // namespace kvferry
