// The part of ShmBackend that handles what peers send to it: hellos, requests to map its regions, pings, notifications.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/base/log.h"
#include "transport/shm/shm_backend.h"

namespace kvferry::shm {
namespace {

constexpr std::size_t kDepartedMax = 64;  // limit on the rings that are kept after their peers have disconnected

}  // namespace

bool ShmBackend::serve(Inbound& inbound) {
  while (true) {
    const Received received = receive_packet(inbound.socket.get());
    if (received.is_closed) return false;
    if (!received.packet) return !inbound.ring || deliver_notes(inbound);
    if (!on_packet(inbound, *received.packet)) return false;
  }
}

bool ShmBackend::on_packet(Inbound& inbound, const Packet& packet) {
  if (inbound.ended_at != 0) return true;
  if (!inbound.ring) return packet.type == Type::kHello && on_hello(inbound, packet);
  switch (packet.type) {
    case Type::kMapRequest:
      on_map_request(inbound, packet);
      return true;
    case Type::kPing:
      send_packet(inbound.socket.get(), Type::kPong);
      return true;
    default:  // a kWake needs no action here: serve() reads the ring after the last packet
      return true;
  }
}

bool ShmBackend::on_hello(Inbound& inbound, const Packet& packet) {
  const Result<Hello> hello = decode<Hello>(packet.body, "hello");
  if (!hello) return false;
  const auto refuse = [&](std::string why) {
    send_message(inbound.socket.get(), Type::kWelcome, Welcome{std::move(why)});
    return false;
  };
  // The incarnation and the secret are checked before the version, so that a process without the address does not learn
  // the version.
  const SecretCheck shown = secret_.check(hello->secret);
  if (hello->to_incarnation != address_.incarnation || shown.kind == SecretCheck::Kind::kUnknown)
    return refuse("the address is of an earlier start of the peer, or is wrong");
  if (hello->protocol_version != kProtocolVersion)
    return refuse(
        fmt::format("the peer's shared memory protocol has version {}, this side has version {}; run the same kvferry "
                    "release on both",
                    kProtocolVersion, hello->protocol_version));
  if (!shown.is_accepted()) return refuse(std::string(kAddressRevoked));
  Result<SharedMapping> pages = SharedMapping::create("kvferry", NoteRing::kPageBytes);
  if (!pages) return refuse(pages.error().what);
  inbound.ring.emplace(std::move(*pages));
  inbound.from = hello->from;
  inbound.secret = hello->secret;
  inbound.member = shown.member;
  --num_pending_handshakes_;
  const int fds[] = {inbound.ring->fd(), control_->fd()};
  const Welcome welcome{"", reinterpret_cast<std::uintptr_t>(&probe_), shown.member.has_value(),
                        shown.member.value_or("")};
  return send_message(inbound.socket.get(), Type::kWelcome, welcome, fds);
}

void ShmBackend::on_map_request(const Inbound& inbound, const Packet& packet) {
  const Result<MapRequest> request = decode<MapRequest>(packet.body, "map request");
  if (!request) return;
  const auto region = shared_regions_.find(RegionId{request->region});
  MapReply reply{request->region, "", 0, 0, request->writes};
  const auto refuse = [&](std::string why) {
    reply.refusal = std::move(why);
    send_message(inbound.socket.get(), Type::kMapReply, reply);
  };
  if (region == shared_regions_.end())
    return refuse(fmt::format("the peer has unregistered region {}", request->region));
  const GrantId grant{request->grant};
  if (request->writes || grant != GrantId{}) {
    const Result<std::byte*> allowed = table_.begin_access(region->first, grant, 0, 1, request->writes, inbound.member);
    if (!allowed) return refuse(allowed.error().what);
    table_.end_access(region->first, grant);
  }
  // The region's file is opened once more, read-only, so that the peer can't write through this descriptor.
  const OwnedFd reads(::open(fmt::format("/proc/self/fd/{}", region->second.fd.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!reads)
    return refuse(fmt::format("the peer can't open the memory of its region {} read-only: {}", request->region,
                              std::strerror(errno)));
  reply.fd_offset = region->second.fd_offset;
  reply.bytes = region->second.bytes;
  const int fds[] = {request->writes ? region->second.fd.get() : reads.get()};
  send_message(inbound.socket.get(), Type::kMapReply, reply, fds);
}

bool ShmBackend::deliver_notes(Inbound& inbound) {
  if (inbound.ended_at != 0) return true;
  if (!is_spinning_) inbound.ring->ask_to_be_woken();
  while (inbound.ring->has_notes()) {
    if (table_.completion_queue().is_full_of_notifications()) {
      has_backlog_ = true;
      return true;
    }
    std::optional<std::string> note = inbound.ring->pop();
    if (!note) {
      log().warn("shm: disconnected the peer with process id {}, because it wrote a notification whose length is wrong",
                 peer_process(inbound.socket.get()));
      return false;
    }
    table_.completion_queue().notify({inbound.from, std::move(*note)});
  }
  return true;
}

void ShmBackend::close_inbound(std::uint32_t number) {
  const auto inbound = inbound_.find(number);
  if (!inbound->second.ring) {
    --num_pending_handshakes_;
  } else if (inbound->second.ended_at == 0 && deliver_notes(inbound->second) && inbound->second.ring->has_notes()) {
    // The peer has reported the transfers of these notifications as complete.
    if (departed_.size() < kDepartedMax) {
      departed_.push_back(std::move(inbound->second));
      departed_.back().socket = OwnedFd();
    } else {
      log().warn(
          "shm: lost notifications of a peer that has disconnected, because {} notifications are unread and those of "
          "{} such peers wait already",
          CompletionQueue::kNotificationsMax, kDepartedMax);
    }
  }
  if (inbound->second.ended_at != 0) --num_ended_;
  inbound_.erase(inbound);
}

void ShmBackend::drop_slow_peers(TimeNs now) {
  if (num_pending_handshakes_ == 0 && num_ended_ == 0) return;
  std::vector<std::uint32_t> slow;
  for (const auto& [number, inbound] : inbound_) {
    if (inbound.ring && inbound.ended_at == 0) continue;
    if (now - std::max(inbound.accepted_at, inbound.ended_at) >= options_.silence_ns) slow.push_back(number);
  }
  for (const std::uint32_t number : slow) close_inbound(number);
}

void ShmBackend::follow_key(TimeNs now) {
  key_check_at_ = now + net::ClusterKey::kLookEveryNs;
  const std::uint64_t version = secret_.key_version();
  if (std::exchange(key_version_, version) == version) return;
  for (auto& [number, inbound] : inbound_) {
    if (!inbound.ring || inbound.ended_at != 0 || secret_.check(inbound.secret).is_accepted()) continue;
    log().info("shm: ended the connection of process {}: {}", peer_process(inbound.socket.get()), kAddressRevoked);
    // The peer sees the end, finishes a copy that it is in the middle of, and closes its socket. Until then its ring
    // says whether it copies, so that no memory is unmapped meanwhile.
    ::shutdown(inbound.socket.get(), SHUT_WR);
    inbound.ended_at = now;
    ++num_ended_;
  }
}

}  // namespace kvferry::shm
