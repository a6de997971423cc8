#include "transport/shm/shm_engine.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kListenerTag = std::uint64_t{1} << 40;
constexpr std::uint64_t kLinkTag = std::uint64_t{2} << 40;     // | PeerId
constexpr std::uint64_t kInboundTag = std::uint64_t{3} << 40;  // | its number
constexpr std::uint64_t kTagMask = std::uint64_t{0xff} << 40;
constexpr std::size_t kStrangersMax = 64;  // connections that have not said hello
constexpr TimeNs kBacklogRetryNs = 10 * kMillisecond;
constexpr TimeNs kLookNs = 5'000;  // while it spins, notes come through memory: sockets can wait this long

std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

}  // namespace

ShmEngine::ShmEngine(const ShmOptions& options, std::uint64_t incarnation, TransferTable& transfer_table)
    : options_(options),
      table_(transfer_table),
      crew_(options.copy_threads),
      loop_(*this, "kvferry-shm", options.spin_ns, kLookNs) {
  address_ = {kProtocolVersion, incarnation, host_identity(), fmt::format("kvferry-{}-{}", ::getpid(), random_name()),
              random_name()};
  signature_ = encode(address_);
}

Result<void> ShmEngine::open() {
  Result<SharedPages> control = SharedPages::create(ControlPage::kPageBytes);
  if (!control) return std::move(control).error();
  control_.emplace(std::move(*control));
  Result<OwnedFd> listener = listen_on(address_.socket_name);
  if (!listener) return std::move(listener).error();
  listener_ = std::move(*listener);
  loop_.watch(listener_.get(), EPOLLIN, kListenerTag);
  loop_.start();
  return {};
}

std::string ShmEngine::describe() const {
  return fmt::format("same host{}{}, {}", options_.use_mappings ? ", mapped shared memory" : "",
                     options_.use_cma ? ", CMA for other memory" : "",
                     crew_.num_threads() == 1 ? "copied by one thread"
                                              : fmt::format("large copies by {} threads", crew_.num_threads()));
}

void ShmEngine::add_peer(PeerId peer, Address address) {
  auto link = std::make_unique<ShmLink>(peer, std::move(address), options_, table_, crew_);
  if (link->connect(signature_, clock_.now())) loop_.watch(link->socket(), EPOLLIN, kLinkTag | peer.value);
  links_.emplace(peer, std::move(link));
  loop_.kick();  // for its deadline
}

void ShmEngine::drop_peer(PeerId peer) { links_.erase(peer); }

void ShmEngine::submit(AcceptedTransfer accepted) {
  const auto link = links_.find(accepted.peer);
  if (link == links_.end()) return table_.complete(accepted.id, ErrorCode::kPeerLost, "disconnected");
  link->second->submit(std::move(accepted), clock_.now());
  if (!link->second->is_idle()) loop_.kick();
}

void ShmEngine::feed(TransferId id, FedCopies more) {
  for (const auto& [peer, link] : links_) {
    if (link->feed(id, more)) return loop_.kick();
  }
}

void ShmEngine::cancel(TransferId id) {
  for (const auto& [peer, link] : links_) {
    if (link->cancel(id)) return;
  }
}

void ShmEngine::add_region(RegionId region, OwnedFd fd, std::uint64_t fd_offset, std::uint64_t bytes) {
  regions_.insert_or_assign(region, SharedRegion{std::move(fd), fd_offset, bytes});
}

void ShmEngine::remove_region(RegionId region) {
  if (regions_.erase(region) == 0) return;
  for (const auto& [number, inbound] : inbound_) {
    if (inbound.ring) send_message(inbound.socket.get(), Type::kUnmap, MapRequest{region.value});
  }
}

Result<std::uint32_t> ShmEngine::reserve_slot() {
  if (!free_slots_.empty()) {
    const std::uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  if (num_slots_made_ == ControlPage::kSlots)
    return Error{ErrorCode::kFull,
                 fmt::format("{} grants are out, which is the limit; revoke one first", num_slots_made_)};
  return num_slots_made_++;
}

bool ShmEngine::close_slot(std::uint32_t slot) {
  control_->close(slot);
  return std::none_of(inbound_.begin(), inbound_.end(), [slot](const auto& entry) {
    return entry.second.ring && entry.second.ring->is_inside(slot);  // a dead peer has no inbound
  });
}

void ShmEngine::shut_down() {
  is_stopping_ = true;
  for (const auto& [peer, link] : links_) link->cancel_all("the transport is shut down");
  links_.clear();
  if (control_) control_->close_all();
  await_copies();
  while (!inbound_.empty()) close_inbound(inbound_.begin()->first);
  listener_ = OwnedFd();
}

void ShmEngine::await_copies() const {
  const TimeNs ends_at = clock_.now() + options_.silence_ns;
  const auto is_copying = [](const auto& entry) {
    return entry.second.ring && entry.second.ring->is_inside() && !is_hung_up(entry.second.socket.get());
  };
  while (std::any_of(inbound_.begin(), inbound_.end(), is_copying)) {
    if (clock_.now() >= ends_at) {
      log().warn("transport: a peer on this host has been in the middle of a copy for {} ms and is not waited for",
                 options_.silence_ns / kMillisecond);
      return;
    }
    ::usleep(20);
  }
}

void ShmEngine::on_ready(std::uint64_t tag, std::uint32_t) {
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

void ShmEngine::accept_all() {
  while (listener_) {
    OwnedFd socket = accept_from(listener_.get());
    if (!socket) return;
    if (num_pending_handshakes_ == kStrangersMax) continue;  // closes it
    const std::uint32_t number = ++num_inbound_made_;
    loop_.watch(socket.get(), EPOLLIN, kInboundTag | number);
    inbound_.emplace(number, Inbound{std::move(socket), "", std::nullopt, clock_.now()});
    ++num_pending_handshakes_;
  }
}

bool ShmEngine::serve(Inbound& inbound) {
  while (true) {
    const Received received = receive_packet(inbound.socket.get());
    if (received.is_closed) return false;
    if (!received.packet) return !inbound.ring || drain(inbound);
    if (!on_packet(inbound, *received.packet)) return false;
  }
}

bool ShmEngine::on_packet(Inbound& inbound, const Packet& packet) {
  if (!inbound.ring) return packet.type == Type::kHello && on_hello(inbound, packet);
  switch (packet.type) {
    case Type::kMapRequest:
      on_map_request(inbound, packet);
      return true;
    case Type::kPing:
      send_packet(inbound.socket.get(), Type::kPong);
      return true;
    default:  // a wake: the ring is emptied after every packet
      return true;
  }
}

bool ShmEngine::on_hello(Inbound& inbound, const Packet& packet) {
  const Result<Hello> hello = decode<Hello>(packet.body, "hello");
  if (!hello) return false;
  const auto refuse = [&](std::string why) {
    send_message(inbound.socket.get(), Type::kWelcome, Welcome{std::move(why)});
    return false;
  };
  if (hello->protocol_version != kProtocolVersion)
    return refuse(fmt::format("it speaks protocol {}, not {}", kProtocolVersion, hello->protocol_version));
  if (hello->to_incarnation != address_.incarnation || hello->secret != address_.secret)
    return refuse("it is another transport than the one whose address you have");
  Result<SharedPages> pages = SharedPages::create(NoteRing::kPageBytes);
  if (!pages) return refuse(pages.error().what);
  inbound.ring.emplace(std::move(*pages));
  inbound.from = hello->from;
  --num_pending_handshakes_;
  const int fds[] = {inbound.ring->fd(), control_->fd()};
  return send_message(inbound.socket.get(), Type::kWelcome, Welcome{"", reinterpret_cast<std::uintptr_t>(&probe_)},
                      fds);
}

void ShmEngine::on_map_request(const Inbound& inbound, const Packet& packet) const {
  const Result<MapRequest> request = decode<MapRequest>(packet.body, "map request");
  if (!request) return;
  const auto region = regions_.find(RegionId{request->region});
  MapReply reply{request->region, "", 0, 0};
  if (region == regions_.end()) {
    reply.refusal = fmt::format("the peer has unregistered region {}", request->region);
    send_message(inbound.socket.get(), Type::kMapReply, reply);
    return;
  }
  reply.fd_offset = region->second.fd_offset;
  reply.bytes = region->second.bytes;
  const int fds[] = {region->second.fd.get()};
  send_message(inbound.socket.get(), Type::kMapReply, reply, fds);
}

bool ShmEngine::drain(Inbound& inbound) {
  if (!is_spinning_) inbound.ring->ask_to_be_woken();
  while (inbound.ring->has_notes()) {
    if (table_.completion_queue().is_full_of_notifications()) {
      has_backlog_ = true;
      return true;
    }
    std::optional<std::string> note = inbound.ring->pop();
    if (!note) {
      log().warn("transport: a peer on this host wrote a malformed notification and is disconnected");
      return false;
    }
    table_.completion_queue().notify({inbound.from, std::move(*note)});
  }
  return true;
}

void ShmEngine::close_inbound(std::uint32_t number) {
  const auto inbound = inbound_.find(number);
  if (inbound->second.ring) {
    drain(inbound->second);  // what it pushed before it went is delivered
  } else {
    --num_pending_handshakes_;
  }
  inbound_.erase(inbound);
}

void ShmEngine::drop_strangers(TimeNs now) {
  if (num_pending_handshakes_ == 0) return;
  std::vector<std::uint32_t> silent;
  for (const auto& [number, inbound] : inbound_) {
    if (!inbound.ring && now - inbound.accepted_at >= options_.silence_ns) silent.push_back(number);
  }
  for (const std::uint32_t number : silent) close_inbound(number);
}

bool ShmEngine::advance(TimeNs now) {
  bool has_more = false;
  if (is_spinning_ || has_backlog_) {
    has_backlog_ = false;
    std::vector<std::uint32_t> broken;
    for (auto& [number, inbound] : inbound_) {
      if (!inbound.ring) continue;
      if (is_spinning_ && !inbound.ring->has_notes()) continue;  // else it asks to be woken
      has_more |= inbound.ring->has_notes();
      if (!drain(inbound)) broken.push_back(number);
    }
    for (const std::uint32_t number : broken) close_inbound(number);
  }
  for (const auto& [peer, link] : links_) has_more |= link->advance(now);
  drop_strangers(now);
  return has_more && !has_backlog_;
}

TimeNs ShmEngine::next_deadline() const {
  TimeNs deadline = has_backlog_ || num_pending_handshakes_ > 0 ? clock_.now() + kBacklogRetryNs : ProgressLoop::kNever;
  for (const auto& [peer, link] : links_) deadline = std::min(deadline, link->next_deadline());
  return deadline;
}

void ShmEngine::set_spinning(bool is_spinning) {
  is_spinning_ = is_spinning;
  if (!control_) return;
  control_->set_spinning(is_spinning);
  if (!is_spinning) has_backlog_ = true;  // one more look at all rings: who came before this has woken nobody
}

}  // namespace kvferry::shm
