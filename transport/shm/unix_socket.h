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
  std::optional<Packet> packet;  // none: no packet is waiting, or the connection is closed
  bool is_closed = false;
};

Result<OwnedFd> listen_on(const std::string& name);
/// Connects to the socket with this name. kInvalidArgument: no socket can have this name; kUnavailable: this process
/// can't create a socket; kPeerLost: the connection failed, for example because no process listens on the socket.
Result<OwnedFd> connect_to(const std::string& name);
/// Returns an empty descriptor if no connection could be accepted, or if the accepted one is refused, because its user
/// is unknown, or is neither this process's user nor root.
OwnedFd accept_from(int listener);

/// Returns false if the packet was not sent, for example because the process at the other end is gone or its queue is
/// full.
bool send_packet(int socket, Type type, std::string_view body = {}, std::span<const int> fds = {});
template <class Message>
bool send_message(int socket, Type type, const Message& message, std::span<const int> fds = {}) {
  return send_packet(socket, type, encode(message), fds);
}
Received receive_packet(int socket);
/// Returns whether the other end of the connection is closed, even if packets are left to be received.
bool is_hung_up(int socket);

/// Returns the pid of the process at the other end; 0 if the pid is unknown, for example because that process is in
/// another PID namespace.
int peer_process(int socket);
/// Returns a number that is equal for processes that can reach each other's abstract sockets.
std::uint64_t host_identity();

}  // namespace kvferry::shm
