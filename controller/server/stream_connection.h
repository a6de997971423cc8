// One connection of the stream at the controller: what came in and isn't whole yet, what is still to go out.
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
  /// Takes in what waits, at most `scratch.size()` bytes of it, and calls `take(message)` for each message that is
  /// whole. `num_claimed`: set where a length is beyond what is allowed; nothing that follows can be read.
  template <class Take>
  Received receive(std::string& scratch, TimeNs now, const Take& take, std::optional<std::uint32_t>& num_claimed);

  /// False: its peer doesn't read; the message is dropped. It goes out with flush().
  bool send(std::string_view message);
  /// One write. False: the connection is over.
  bool flush();
  bool has_unsent() const { return !out_.empty(); }

  /// After a last word nothing is heard any more, until the peer hangs up or `ends_at` comes: what a closed socket
  /// still finds unread would take the last word with it.
  void end(TimeNs ends_at);
  bool is_ending() const { return ends_at_.has_value(); }
  bool is_over(TimeNs now) const { return ends_at_ && now >= *ends_at_; }

  // The owner's notes.
  bool waits_for_room = false;  // to be told when the peer reads
  bool is_given_up = false;     // to be closed at the end of the turn

 private:
  long read_some(std::string& scratch) const;

  ConnectionId id_;
  TimeNs heard_at_;
  OwnedFd socket_;
  std::string in_;   // begins with a length; a message that is not whole
  std::string out_;  // from num_sent_ on
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
    in_ = std::string();  // a large message's memory
  else if (in_.empty())
    in_.assign(rest);
  else
    in_.erase(0, in_.size() - rest.size());
  return received;
}

}  // namespace kvferry::controller
