// What a node says to one controller, and makes of its answers: the client without its connection.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/client.h"
#include "controller/client/publisher.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

namespace wire {
struct Registered;
struct Refused;
struct Unregistered;
struct LookupReply;
struct HeartbeatAck;
struct Pin;
struct Unpin;
struct Replicate;
struct EvictOrder;
}  // namespace wire

constexpr std::size_t kResendBytesMax = std::size_t{16} << 20;  // a second of a million keys

/// kInvalidArgument: too many keys for one message.
Result<void> check_lookup(const LookupQuery& query);

/// Pure: no I/O and no clock. Threads: one at a time.
class ClientSession {
 public:
  /// Hands a message to the connection. False: it did not get out.
  using Send = std::function<bool(std::string_view bytes)>;

  ClientSession(ClientOptions options, Send send, std::size_t resend_bytes_max = kResendBytesMax);
  ClientSession(const ClientSession&) = delete;
  ClientSession& operator=(const ClientSession&) = delete;

  /// One turn: take() what came, then check_silence(), then speak().
  void take(std::string_view bytes, std::vector<ClientEvent>& events);
  /// True: the controller was silent for lost_after_ms, up to four times as long where it never answered. A connection
  /// that died without a word looks alive to TCP for minutes, so it is to be given up for a new one.
  bool check_silence(TimeNs now, std::vector<ClientEvent>& events);
  /// Says what is due.
  void speak(TimeNs now);
  /// The connection broke. What waits for an answer gets none.
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
  Result<std::uint64_t> lookup(const LookupQuery& query);
  /// True: there was somebody to say goodbye to.
  bool leave();

  bool is_registered() const { return state_ == State::kRegistered; }
  bool is_over() const { return state_ == State::kRefused || state_ == State::kLeft; }
  const ClientOptions& options() const { return options_; }
  const Publisher& publisher() const { return publisher_; }

 private:
  enum class State { kConnecting, kRegistered, kRefused, kLeft };

  void on(const wire::Registered& message, std::vector<ClientEvent>& events);
  void on(wire::Refused& message, std::vector<ClientEvent>& events);
  void on(const wire::SnapshotWanted& message, std::vector<ClientEvent>& events);
  void on(const wire::Unregistered& message, std::vector<ClientEvent>& events);
  void on(wire::LookupReply& message, std::vector<ClientEvent>& events);
  void on(const wire::HeartbeatAck& message, std::vector<ClientEvent>& events);
  void on(wire::Pin& message, std::vector<ClientEvent>& events);
  void on(const wire::Unpin& message, std::vector<ClientEvent>& events);
  void on(wire::Replicate& message, std::vector<ClientEvent>& events);
  void on(wire::EvictOrder& message, std::vector<ClientEvent>& events);
  /// The rest only nodes send.
  template <class T>
  void on(const T&, std::vector<ClientEvent>&) {}

  bool is_for_us(std::uint64_t incarnation_named) const {
    return is_registered() && incarnation_named == incarnation();
  }
  std::uint64_t incarnation() const { return options_.node.incarnation.value; }
  /// In the version that was agreed on.
  bool send(std::string_view bytes);
  void lose(std::string reason, std::vector<ClientEvent>& events);

  ClientOptions options_;
  Send send_;
  State state_ = State::kConnecting;
  std::uint32_t version_;                   // of the protocol, that is spoken
  std::optional<TimeNs> spoke_at_;          // last Hello or Heartbeat that got out
  std::uint64_t beat_sequence_ = 0;         // told by the last heartbeat
  std::uint64_t load_ = 0, beat_load_ = 0;  // what there is, and what the last heartbeat told
  std::optional<TimeNs> waiting_since_;     // oldest Hello or Heartbeat since the controller's last word
  std::uint32_t num_silences_ = 0;          // connections given up since its last word
  Publisher publisher_;
  std::uint64_t last_token_ = 0;
  std::set<std::uint64_t> pending_;
};

}  // namespace kvferry::controller
