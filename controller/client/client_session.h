// The protocol between a node and one controller from the node's side, without the connection.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "controller/api/client.h"
#include "controller/client/publisher.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

// Default limit on the total size of the messages that a Publisher stores: enough for one second at a million keys per
// second.
constexpr std::size_t kResendBytesMax = std::size_t{16} << 20;

/// Checks the size of a lookup. kInvalidArgument: `query` has more than 65536 keys, which is the limit for one message.
Result<void> check_lookup(const LookupQuery& query);

/// A node's session with one controller. It has no socket, and reads no clock except ClientOptions::wall_ms. Threads:
/// one at a time.
class ClientSession {
 public:
  /// Hands a message to the connection. Returns false if the message was not sent.
  using Send = std::function<bool(std::string_view bytes)>;

  ClientSession(ClientOptions options, Send send, std::size_t resend_bytes_max = kResendBytesMax);
  ClientSession(const ClientSession&) = delete;
  ClientSession& operator=(const ClientSession&) = delete;

  /// Handles one message. In each turn of its loop, the owner calls receive() for each message, then check_silence(),
  /// then send_due().
  void receive(std::string_view bytes, std::vector<ClientEvent>& events);
  /// Returns true if the controller was silent for too long: lost_after_ms or, after Hellos without an answer, up to
  /// four times that. The caller then reconnects, because TCP may take minutes to notice a peer that ended without
  /// closing the connection.
  bool check_silence(TimeNs now, std::vector<ClientEvent>& events);
  /// Sends a Hello or, if the node is registered, a heartbeat when it is due. After a publish or evict a heartbeat is
  /// due earlier, because a heartbeat shows the controller whether the last of these messages was lost.
  void send_due(TimeNs now);
  /// The owner must call this function when the connection has broken. Pending lookups get no answer.
  void broken(std::vector<ClientEvent>& events);

  void publish(const std::vector<ChunkEntry>& chunks, Tier tier = Tier::kHost) {
    if (!is_over()) publisher_.publish(chunks, tier);
  }
  void evict(const std::vector<ChunkKey>& keys) {
    if (!is_over()) publisher_.evict(keys);
  }
  void end_snapshot() {
    if (!is_over()) publisher_.end_snapshot();
  }
  void set_load(std::uint64_t num_requests) { load_ = num_requests; }
  void set_report(std::string report) { report_ = std::move(report); }
  Result<std::uint64_t> lookup(const LookupQuery& query);
  /// Unregisters the node. Returns true if the node was registered: the connection then needs a moment to send the
  /// Leave.
  bool leave();

  bool is_registered() const { return state_ == State::kRegistered; }
  bool is_over() const { return state_ == State::kRefused || state_ == State::kLeft; }
  const ClientOptions& options() const { return options_; }
  const Publisher& publisher() const { return publisher_; }

 private:
  enum class State { kConnecting, kRegistered, kRefused, kLeft };
  struct Receiver;  // visitor with one overload for each message of the controller

  std::uint64_t incarnation() const { return options_.node.incarnation.value; }
  bool send_hello();
  bool send_heartbeat();
  /// Sets the protocol version of a message to version_ and sends the message.
  bool send(std::string_view bytes);
  void lose(std::string reason, std::vector<ClientEvent>& events);

  ClientOptions options_;
  Send send_;
  State state_ = State::kConnecting;
  // Agreed version of the protocol; before the registration, the oldest version that this client speaks.
  std::uint32_t version_;
  std::optional<TimeNs> sent_at_;           // time of the last Hello or Heartbeat; none: the next one is due at once
  std::uint64_t beat_sequence_ = 0;         // value of next_sequence() in the last heartbeat
  std::uint64_t load_ = 0, beat_load_ = 0;  // current load, and the load in the last heartbeat
  std::string report_;                      // report for the next heartbeat; empty: none is due
  // Time of the oldest Hello or due heartbeat since the controller's last message; none: no answer is due.
  std::optional<TimeNs> waiting_since_;
  std::uint32_t num_silences_ = 0;    // silent connections, in a row, that were given up before registration
  std::uint64_t num_unreadable_ = 0;  // dropped messages of the controller
  Publisher publisher_;
  std::uint64_t last_token_ = 0;
  std::set<std::uint64_t> pending_;  // tokens of unanswered lookups
};

}  // namespace kvferry::controller
