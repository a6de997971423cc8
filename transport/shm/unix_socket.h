// Packets with descriptors over abstract Unix sockets. Nothing here blocks. Private to this folder.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"
#include "transport/base/wire.h"
#include "transport/shm/messages.h"

namespace kvferry::shm {

struct Packet {
  Type type{};
  std::string body;
  std::vector<OwnedFd> fds;
};

struct Received {
  std::optional<Packet> packet;  // none: nothing there now, or the other side is gone
  bool is_closed = false;
};

Result<OwnedFd> listen_on(const std::string& name);
/// kPeerLost: nobody listens there (any more).
Result<OwnedFd> connect_to(const std::string& name);
/// None: nobody waits to be accepted, or a process of another user did.
OwnedFd accept_from(int listener);

/// False: the other side is gone or so far behind that its queue is full.
bool send_packet(int socket, Type type, std::string_view body = {}, std::span<const int> fds = {});
template <class Message>
bool send_message(int socket, Type type, const Message& message, std::span<const int> fds = {}) {
  return send_packet(socket, type, encode(message), fds);
}
Received receive_packet(int socket);
/// The other side is gone, whatever it has still left to be received.
bool is_hung_up(int socket);

/// Of the process at the other end; 0 when it is not visible from here.
int peer_process(int socket);
/// Equal for processes that can reach each other's abstract sockets.
std::uint64_t host_identity();

}  // namespace kvferry::shm
