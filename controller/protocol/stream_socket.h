// Sockets of the stream: messages of the controller's protocol, each behind its length, over TCP or a Unix socket.
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
  OwnedFd lock;          // of a Unix socket's path: held while this process listens there
  std::string endpoint;  // where it listens in fact
};
/// A file that a dead listener left at a Unix socket's path is replaced, a living one's never. May ask a name server.
/// kUnavailable: the address can't be listened on, e.g. in use.
Result<BoundSocket> listen_on(const StreamAddress& address);

/// Not blocking; the connection may be under way still. `host` must be a number. kUnavailable: nobody listens there.
Result<OwnedFd> begin_connect(const StreamAddress& address);
/// The first address of a host's name. Blocks as long as name servers take. kNotFound: none.
Result<std::string> resolve(const std::string& host);
bool is_numeric(const std::string& host);
/// Non-blocking, without delay; none: nobody waits, or no descriptor is left (errno tells).
OwnedFd accept_from(int listener);

/// In front of each message: its length, little-endian.
constexpr std::size_t kLengthBytes = 4;
void append_frame(std::string& out, std::string_view message);
/// Of `bytes`, which are at least kLengthBytes.
std::uint32_t frame_length(std::string_view bytes);

}  // namespace kvferry::controller
