#include "transport/shm/shm_backend.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "transport/backend_transport.h"
#include "transport/base/log.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kListenerTag = std::uint64_t{1} << 40;
constexpr std::uint64_t kLinkTag = std::uint64_t{2} << 40;     // kLinkTag | PeerId: tag of a link's socket
constexpr std::uint64_t kInboundTag = std::uint64_t{3} << 40;  // kInboundTag | number: tag of an accepted socket
constexpr std::uint64_t kTagMask = std::uint64_t{0xff} << 40;
constexpr std::size_t kPendingHandshakesMax = 64;  // limit of connections without a hello; further ones are closed
constexpr TimeNs kBacklogRetryNs = 10 * kMillisecond;
// Time between checks of the sockets by a thread that polls in ProgressLoop::drive(). The checks are rare, because that
// thread finds notifications in shared memory.
constexpr TimeNs kLookNs = 5'000;

std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

}  // namespace

ShmBackend::ShmBackend(const ShmOptions& options)
    : Backend(options.transfers_max),
      options_(options),
      copy_threads_(options.copy_threads),
      secret_(options.key),
      loop_(*this, "kvferry-shm", options.spin_ns, kLookNs) {
  address_ = {kProtocolVersion, incarnation_, host_identity(), fmt::format("kvferry-{}-{}", ::getpid(), random_name()),
              secret_.root()};
  source_address_ = source_address(options_.key, encode(address_), change_shm_secret);
}

Result<void> ShmBackend::start() {
  control_.emplace(KVFERRY_TRY(SharedMapping::create_for_readers("kvferry", ControlPage::kPageBytes)));
  listener_ = KVFERRY_TRY(listen_on(address_.socket_name));
  if (secret_.can_change()) key_check_at_ = 0;
  if (!loop_.watch(listener_.get(), EPOLLIN, kListenerTag))
    return Error{ErrorCode::kUnavailable,
                 fmt::format("shm: cannot watch the listening socket: {}", std::strerror(errno))};
  loop_.start();
  return {};
}

std::string ShmBackend::describe() const {
  const std::size_t num_threads = copy_threads_.num_threads();
  return fmt::format(
      "same host{}{}, {}", options_.use_mappings ? ", mapped shared memory" : "",
      options_.use_cma ? (options_.use_mappings ? ", CMA for other memory" : ", CMA") : "",
      num_threads == 1 ? "all copies by one thread" : fmt::format("large copies by {} threads", num_threads));
}

Result<std::uint64_t> ShmBackend::check_address(const std::string& address) {
  const Address parsed = KVFERRY_TRY(read_address<Address>(address, kProtocolVersion, "shared memory"));
  if (parsed.host != address_.host)
    return Error{ErrorCode::kInvalidArgument,
                 "the peer is on another host or in another network namespace; shared memory needs the same"};
  return parsed.incarnation;
}

bool ShmBackend::wait(TimeNs timeout_ns) {
  const CompletionQueue& completion_queue = table_.completion_queue();
  const std::optional<bool> driven =
      loop_.drive(timeout_ns, [&completion_queue] { return completion_queue.has_something(); });
  return driven ? *driven : Backend::wait(timeout_ns);
}

void ShmBackend::set_wait_interrupt_fd(int fd) {
  Backend::set_wait_interrupt_fd(fd);
  loop_.add_wakeup_fd(fd);
}

void ShmBackend::add_peer(PeerId peer, const std::string& address) {
  auto link = std::make_unique<ShmLink>(peer, decode<Address>(address, "peer address").value(), options_, table_,
                                        copy_threads_, clock_);
  // A link whose socket can't be watched fails as silent when an answer is due.
  if (link->connect(source_address_, clock_.now())) (void)loop_.watch(link->socket(), EPOLLIN, kLinkTag | peer.value);
  links_.emplace(peer, std::move(link));
  loop_.kick();  // the progress thread must now take the link's deadline into account
}

void ShmBackend::submit(AcceptedTransfer accepted) {
  ShmLink& link = *links_.at(accepted.peer);
  link.submit(std::move(accepted));
  if (!link.is_idle()) loop_.kick();
}

void ShmBackend::feed(FedCopies more) {
  const auto link = links_.find(more.peer);
  if (link != links_.end() && link->second->feed(more)) loop_.kick();
}

void ShmBackend::cancel(PeerId peer, TransferId id) {
  if (const auto link = links_.find(peer); link != links_.end()) link->second->cancel(id);
}

void ShmBackend::stop() {
  for (const auto& [peer, link] : links_) link->cancel_all("this process shuts its transport down");
  links_.clear();
  if (control_) control_->close_all();
  await_copies();
  while (!inbound_.empty()) close_inbound(inbound_.begin()->first);
  listener_ = OwnedFd();
  key_check_at_ = ProgressLoop::kNever;
}

void ShmBackend::await_copies() const {
  const TimeNs ends_at = clock_.now() + options_.silence_ns;
  const auto is_copying = [](const auto& entry) {
    return entry.second.ring && entry.second.ring->is_inside() && !is_hung_up(entry.second.socket.get());
  };
  while (std::any_of(inbound_.begin(), inbound_.end(), is_copying)) {
    if (clock_.now() >= ends_at) {
      log().warn(
          "shm: a peer has not finished a copy from or to this process's memory for {} ms (setting silence_ms); this "
          "process shuts down without waiting for it any longer",
          options_.silence_ns / kMillisecond);
      return;
    }
    ::usleep(20);
  }
}

void ShmBackend::on_ready(std::uint64_t tag, std::uint32_t) {
  const auto number = static_cast<std::uint32_t>(tag & ~kTagMask);
  if ((tag & kTagMask) == kListenerTag) return accept_all();
  if ((tag & kTagMask) == kLinkTag) {
    if (const auto link = links_.find(PeerId{number}); link != links_.end() && !link->second->is_failed())
      link->second->on_readable(clock_.now());
    return;
  }
  const auto inbound = inbound_.find(number);
  if (inbound != inbound_.end() && !serve(inbound->second)) close_inbound(number);
}

void ShmBackend::accept_all() {
  while (listener_) {
    errno = 0;
    OwnedFd socket = accept_from(listener_.get());
    if (!socket && spare_.refuse(listener_.get(), "shm")) continue;
    if (!socket) return;
    if (num_pending_handshakes_ == kPendingHandshakesMax) continue;  // the destructor of `socket` closes it
    const std::uint32_t number = ++num_inbound_made_;
    // The peer of a closed connection uses another path. A connection that is not watched would be of no use to it.
    if (!loop_.watch(socket.get(), EPOLLIN, kInboundTag | number)) continue;
    inbound_.emplace(number, Inbound{std::move(socket), "", std::nullopt, clock_.now()});
    ++num_pending_handshakes_;
  }
}

bool ShmBackend::advance(TimeNs now) {
  bool has_more = false;
  if (is_spinning_ || has_backlog_) {
    has_backlog_ = false;
    std::vector<std::uint32_t> broken;
    for (auto& [number, inbound] : inbound_) {
      if (!inbound.ring || inbound.ended_at != 0) continue;
      // While this side polls, empty rings are skipped. While this side does not poll, deliver_notes() must run for
      // empty rings too, since deliver_notes() asks the producer to wake this side.
      if (is_spinning_ && !inbound.ring->has_notes()) continue;
      has_more |= inbound.ring->has_notes();
      if (!deliver_notes(inbound)) broken.push_back(number);
    }
    for (const std::uint32_t number : broken) close_inbound(number);
    std::erase_if(departed_, [this](Inbound& one) { return !deliver_notes(one) || !one.ring->has_notes(); });
  }
  for (const auto& [peer, link] : links_) has_more |= link->advance(now);
  if (now >= key_check_at_) follow_key(now);
  drop_slow_peers(now);
  return has_more && !has_backlog_;
}

TimeNs ShmBackend::next_deadline() const {
  TimeNs deadline = key_check_at_;
  if (has_backlog_ || num_pending_handshakes_ > 0 || num_ended_ > 0)
    deadline = std::min(deadline, clock_.now() + kBacklogRetryNs);
  for (const auto& [peer, link] : links_) deadline = std::min(deadline, link->next_deadline());
  return deadline;
}

void ShmBackend::set_spinning(bool is_spinning) {
  is_spinning_ = is_spinning;
  if (!control_) return;
  control_->set_spinning(is_spinning);
  // While this side polled, peers woke no thread, so advance() must read all rings now.
  if (!is_spinning) has_backlog_ = true;
}

}  // namespace kvferry::shm

namespace kvferry {

Result<std::string> change_shm_secret(const std::string& bytes, const SecretChange& change) {
  shm::Address address = KVFERRY_TRY(read_address<shm::Address>(bytes, shm::kProtocolVersion, "shared memory"));
  address.secret = change(address.secret);
  return encode(address);
}

Result<std::unique_ptr<Transport>> make_shm_transport(const ShmOptions& options) {
  KVFERRY_TRY(check_options(
      "the shared memory backend",
      {{"transfers_max", options.transfers_max}, {"spin_ns", options.spin_ns, 0}, {"silence_ns", options.silence_ns}}));
  auto backend = std::make_unique<shm::ShmBackend>(options);
  KVFERRY_TRY(backend->start());
  return std::unique_ptr<Transport>(std::make_unique<BackendTransport>(std::move(backend)));
}

}  // namespace kvferry
