// Stream connections: messages of the controller's protocol over TCP or a Unix socket, each preceded by its length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "controller/api/endpoint.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::controller {

struct BoundSocket {
  OwnedFd socket;
  OwnedFd lock;          // lock file of a Unix socket's path, held while this process listens there
  std::string endpoint;  // endpoint with the actual port
};
/// Listens on `address`. Replaces the socket file of a process that has ended. Resolving a host name may block.
/// kUnavailable: this process cannot listen there, e.g. because the address is in use.
Result<BoundSocket> listen_on(const StreamAddress& address);

/// Starts a connection without blocking. A Unix socket is connected at once; kPeerLost: it can't be connected, e.g.
/// because no process listens on the path. A TCP connection may still be in progress, and may fail later; its errors
/// are those of net::begin_connect_tcp().
Result<OwnedFd> begin_connect(const StreamAddress& address);

/// Each message is preceded by its length, a little-endian integer of this many bytes.
constexpr std::size_t kLengthBytes = 4;
void append_frame(std::string& out, std::string_view message);
/// Returns the length at the start of `bytes`, which has at least kLengthBytes bytes.
std::uint32_t frame_length(std::string_view bytes);

/// Reads once from the socket, up to `to.size()` bytes. Returns the number of bytes read, 0 if the connection has
/// ended, or a negative number if there is no input to read.
long read_some(int socket, std::string& to);

/// Messages that a connection has not sent yet.
class UnsentMessages {
 public:
  explicit UnsentMessages(std::size_t bytes_max) : bytes_max_(bytes_max) {}

  /// Appends a message. Returns false if unsent messages leave no room for it. One message of any size may wait alone,
  /// such as the status of thousands of nodes.
  bool add(std::string_view message);
  /// Writes once to the socket. Returns false if the connection has ended.
  bool write_to(int socket);
  /// Drops all unsent messages.
  void clear();
  bool empty() const { return bytes_.empty(); }

 private:
  std::size_t bytes_max_;
  std::string bytes_;  // messages with their lengths; the first num_sent_ bytes are sent
  std::size_t num_sent_ = 0;
};

}  // namespace kvferry::controller
