#include "transport/ucx/progress_engine.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"

namespace kvferry::ucx {

Result<std::unique_ptr<ProgressEngine>> ProgressEngine::start(const UcxOptions& options, std::uint64_t incarnation,
                                                              TransferTable& transfer_table) {
  std::unique_ptr<ProgressEngine> engine(new ProgressEngine(options, incarnation, transfer_table));
  std::promise<Result<void>> started;
  std::future<Result<void>> outcome = started.get_future();
  engine->thread_ = std::thread(&ProgressEngine::thread_main, engine.get(), std::move(started));
  if (Result<void> ok = outcome.get(); !ok) return std::move(ok).error();
  return engine;
}

ProgressEngine::ProgressEngine(const UcxOptions& options, std::uint64_t incarnation, TransferTable& transfer_table)
    : options_(options), incarnation_(incarnation), table_(transfer_table) {}

ProgressEngine::~ProgressEngine() { join(); }

void ProgressEngine::join() {
  if (thread_.joinable()) thread_.join();
}

std::string ProgressEngine::path() const {
  const std::lock_guard lock(path_mutex_);
  return path_;
}

void ProgressEngine::thread_main(std::promise<Result<void>> started) {
  ::pthread_setname_np(::pthread_self(), "kvferry-ucx");
  Result<void> ready = set_up();
  const bool is_up = static_cast<bool>(ready);
  started.set_value(std::move(ready));
  if (is_up) run();
  tear_down();
}

void ProgressEngine::run() {
  TimeNs busy_at = clock_.now();
  const auto is_quiet = [this] {
    return stopping_ && transfers_.empty() &&
           std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second.peer->is_closed(); });
  };
  while (true) {
    const bool has_admitted = admit();
    const bool has_progressed = worker_->progress();
    const TimeNs now = clock_.now();
    advance_transfers(now);
    advance_peers(now);
    complete_finished();
    if (is_quiet()) return;  // before any sleep: nothing would wake us
    if (has_admitted || has_progressed || !may_sleep()) busy_at = now;
    if (now - busy_at >= options_.spin_ns) wait_for_work(now);
  }
}

void ProgressEngine::tear_down() {
  peers_.clear();
  for (const auto& [region, memory] : memories_) worker_->unmap_memory(memory.handle);
  for (const auto& [device, stream] : hash_streams_) device->drop_stream(stream);
  worker_.reset();
}

bool ProgressEngine::admit() {
  std::vector<Command> commands = inbox_.take();
  for (Command& command : commands) std::visit([this](auto& one) { handle(one); }, command);
  return !commands.empty();
}

void ProgressEngine::handle(SubmitCommand& command) {
  const auto entry = peers_.find(command.transfer.peer);
  KVFERRY_CHECK(entry != peers_.end(), "transfer {} was accepted for an unknown peer", command.transfer.id);
  entry->second.peer->connect();
  const LocalMemory& memory = memories_.at(command.transfer.local);
  auto transfer =
      std::make_unique<UcxTransfer>(options_, *entry->second.peer, asked_, std::move(command.transfer), memory);
  const auto goes_after = [](Priority priority, const auto& other) { return priority < other->priority(); };
  const auto place = std::upper_bound(transfers_.begin(), transfers_.end(), transfer->priority(), goes_after);
  transfers_.insert(place, std::move(transfer));
}

void ProgressEngine::handle(FeedCommand& command) {
  // One that ended meanwhile has no use for it.
  for (const auto& transfer : transfers_) {
    if (transfer->id() == command.id) return transfer->feed(std::move(command.fed));
  }
}

void ProgressEngine::handle(CancelCommand& command) {
  for (const auto& transfer : transfers_) {
    if (transfer->id() == command.id) transfer->cancel(clock_.now());
  }
}

void ProgressEngine::handle(AddPeerCommand& command) {
  peers_[command.peer].peer = std::make_unique<UcxPeer>(*worker_, command.peer, std::move(command.address));
}

void ProgressEngine::handle(DropPeerCommand& command) {
  PeerEntry& entry = peers_.at(command.peer);
  entry.dropped = true;
  entry.peer->drain(clock_.now() + options_.stuck_ns);
}

void ProgressEngine::handle(MapMemoryCommand& command) {
  const bool is_host = command.device == nullptr || command.device->is_host();
  const ucs_memory_type_t type = is_host ? UCS_MEMORY_TYPE_HOST : UCS_MEMORY_TYPE_CUDA;
  Result<UcpWorker::Memory> memory = worker_->map_memory(command.base, command.bytes, type);
  if (!memory) return command.rkey.set_value(std::move(memory).error());
  LocalMemory& local = memories_[command.region];
  local = {memory->handle, type, command.device, nullptr};
  if (command.device != nullptr) {
    auto stream = hash_streams_.find(command.device);
    if (stream == hash_streams_.end()) {
      Result<DeviceStream> made = command.device->make_stream();
      if (!made) {
        worker_->unmap_memory(memory->handle);
        memories_.erase(command.region);
        return command.rkey.set_value(std::move(made).error());
      }
      stream = hash_streams_.emplace(command.device, *made).first;
    }
    local.stream = stream->second;
  }
  command.rkey.set_value(std::move(memory->rkey));
}

void ProgressEngine::handle(UnmapMemoryCommand& command) {
  const auto found = memories_.find(command.region);
  KVFERRY_CHECK(found != memories_.end(), "region {} was unregistered twice", command.region);
  worker_->unmap_memory(found->second.handle);
  memories_.erase(found);
  command.unmapped.set_value();
}

void ProgressEngine::handle(StopCommand&) {
  const TimeNs now = clock_.now();
  stopping_ = true;
  for (const auto& transfer : transfers_) transfer->cancel(now);
  for (auto& [id, entry] : peers_) entry.peer->drain(now + options_.stuck_ns);
}

void ProgressEngine::advance_transfers(TimeNs now) {
  for (const auto& transfer : transfers_) {
    transfer->advance(now, *worker_, address_);
    const TimeNs deadline = transfer->stuck_deadline();
    if (deadline != 0 && now >= deadline) transfer->peer().fail("a cancelled transfer made no progress");
  }
}

void ProgressEngine::advance_peers(TimeNs now) {
  for (auto it = peers_.begin(); it != peers_.end();) {
    auto& [id, entry] = *it;
    entry.peer->watch(now, options_.silence_ns);
    entry.peer->advance_close(now);
    if (entry.peer->is_ready() && !std::exchange(entry.reported_ready, true)) {
      const std::string transports = entry.peer->transports();
      log().info("transport: connected to peer {} over UCX {}", id, transports);
      const std::lock_guard lock(path_mutex_);
      path_ = transports;
    }
    if (entry.peer->is_failed() && !std::exchange(entry.reported_lost, true)) {
      table_.lose_peer(id);
      if (!entry.dropped && !stopping_) log().warn("transport: lost peer {}: {}", id, entry.peer->why());
    }
    const bool is_done = entry.dropped && entry.peer->is_closed() && entry.peer->num_transfers == 0;
    it = is_done ? peers_.erase(it) : std::next(it);
  }
}

void ProgressEngine::complete_finished() {
  std::erase_if(transfers_, [this](const std::unique_ptr<UcxTransfer>& transfer) {
    if (!transfer->is_over()) return false;
    table_.complete(transfer->id(), transfer->code(), transfer->what(), transfer->corrupt_ranges());
    return true;
  });
}

bool ProgressEngine::may_sleep() const {
  return std::none_of(transfers_.begin(), transfers_.end(), [](const auto& one) { return one->is_hashing(); });
}

void ProgressEngine::wait_for_work(TimeNs now) {
  inbox_.wake().clear();
  if (inbox_.has_commands() || !worker_->arm()) return;
  const TimeNs deadline = next_deadline(now);
  const TimeNs wait_ms = (std::max<TimeNs>(deadline - now, 0) + kMillisecond - 1) / kMillisecond;
  const int timeout_ms = deadline == 0 ? -1 : static_cast<int>(std::min<TimeNs>(wait_ms, 60'000));
  pollfd fds[] = {{worker_->event_fd(), POLLIN, 0}, {inbox_.wake().fd(), POLLIN, 0}};
  const int count = ::poll(fds, std::size(fds), timeout_ms);
  KVFERRY_CHECK(count >= 0 || errno == EINTR, "the progress thread cannot wait: errno {}", errno);
}

TimeNs ProgressEngine::next_deadline(TimeNs now) const {
  TimeNs earliest = std::numeric_limits<TimeNs>::max();
  for (const auto& transfer : transfers_) {
    if (const TimeNs deadline = transfer->stuck_deadline(); deadline != 0) earliest = std::min(earliest, deadline);
  }
  for (const auto& [id, entry] : peers_) {
    if (const TimeNs deadline = entry.peer->watch_deadline(options_.silence_ns); deadline != 0)
      earliest = std::min(earliest, deadline);
    if (entry.peer->is_draining() && !entry.peer->is_failed())
      earliest = std::min(earliest, entry.peer->drain_deadline());
    // UCX closes endpoints in its progress call, which no event announces.
    if (entry.peer->is_failed() && !entry.peer->is_closed()) earliest = std::min(earliest, now + kMillisecond);
  }
  return earliest == std::numeric_limits<TimeNs>::max() ? 0 : earliest;
}

}  // namespace kvferry::ucx
