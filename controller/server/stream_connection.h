// One stream connection of the controller, with incomplete input and unsent output.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "controller/directory/sessions.h"
#include "controller/protocol/stream_socket.h"
#include "controller/protocol/wire.h"
#include "transport/base/clock.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {

/// Threads: one.
class StreamConnection {
 public:
  StreamConnection(ConnectionId id, OwnedFd socket, TimeNs now) : id_(id), heard_at_(now), socket_(std::move(socket)) {}

  ConnectionId id() const { return id_; }
  int fd() const { return socket_.get(); }
  TimeNs heard_at() const { return heard_at_; }

  enum class Received { kMore, kNothing, kEnded };
  /// Reads at most `scratch.size()` waiting bytes and calls `take(message)` for each complete message. Sets
  /// `num_claimed` to the length of a message that is too long; nothing after it can be read.
  template <class Take>
  Received receive(std::string& scratch, TimeNs now, const Take& take, std::optional<std::uint32_t>& num_claimed);

  /// Returns false if the message was dropped because the peer does not read. flush() sends it.
  bool send(std::string_view message);
  /// Writes once. Returns false if the connection is over.
  bool flush();
  bool has_unsent() const { return !out_.empty(); }

  /// Sends what is unsent and ignores input until the peer closes or `ends_at` is reached: closing a socket with unread
  /// input would discard the output.
  void end(TimeNs ends_at);
  bool is_ending() const { return ends_at_.has_value(); }
  bool is_over(TimeNs now) const { return ends_at_ && now >= *ends_at_; }

  // State of the owner.
  bool waits_for_room = false;  // epoll reports when the socket is writable
  bool is_given_up = false;     // closed at the end of the turn

 private:
  long read_some(std::string& scratch) const;

  ConnectionId id_;
  TimeNs heard_at_;
  OwnedFd socket_;
  std::string in_;   // an incomplete message with its length in front
  std::string out_;  // unsent from num_sent_ on
  std::size_t num_sent_ = 0;
  std::optional<TimeNs> ends_at_;
};

template <class Take>
StreamConnection::Received StreamConnection::receive(std::string& scratch, TimeNs now, const Take& take,
                                                     std::optional<std::uint32_t>& num_claimed) {
  const long num_read = read_some(scratch);
  if (num_read < 0) return Received::kNothing;
  if (num_read == 0) return Received::kEnded;
  const Received received = static_cast<std::size_t>(num_read) == scratch.size() ? Received::kMore : Received::kNothing;
  if (is_ending()) return received;
  heard_at_ = now;
  std::string_view rest(scratch.data(), static_cast<std::size_t>(num_read));
  if (!in_.empty()) rest = in_.append(rest);
  while (rest.size() >= kLengthBytes) {
    const std::uint32_t length = frame_length(rest);
    if (length > wire::kMessageBytesMax) {
      num_claimed = length;
      return received;
    }
    if (rest.size() - kLengthBytes < length) break;
    take(rest.substr(kLengthBytes, length));
    rest.remove_prefix(kLengthBytes + length);
  }
  if (rest.empty() && in_.capacity() > scratch.size())
    in_ = std::string();  // frees the memory of a large message
  else if (in_.empty())
    in_.assign(rest);
  else
    in_.erase(0, in_.size() - rest.size());
  return received;
}

}  // namespace kvferry::controller
