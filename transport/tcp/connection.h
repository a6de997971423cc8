// One socket: receives each message's payload into the memory that the message's handler names, and sends payload from
// where it lies.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/tls.h"
#include "transport/memory_access.h"
#include "transport/tcp/messages.h"

namespace kvferry::tcp {

/// Returns true if both ends of the connection are on the same host, that is, have the same address.
inline bool is_same_host(int fd) { return net::local_address(fd).host == net::peer_address(fd).host; }
/// Selects a simple congestion control algorithm for a connection within one host, where congestion cannot occur. Other
/// algorithms may take reordering by two processors for losses, or pace the sender (BBR reduces the rate to a quarter).
void skip_congestion_control_within_host(int fd);

class Connection;

/// A message to be sent.
struct OutMessage {
  std::string head;
  std::vector<iovec> parts;    // the first is reserved for the head, the others are the payload
  std::uint64_t transfer = 0;  // the transfer in whose local memory the payload is; 0: none
  MemoryAccess access;         // access to the payload, held until it is sent
};

/// Handles a connection's messages: the acceptor, or an end of a link (all connections that one transport has opened to
/// another). All methods are called under the loop's lock. A handler may close the connection, or call the connection's
/// fail(), within any of these methods.
class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  /// Called once messages can be sent: after the TLS handshake or, without TLS, when a connection that this process has
  /// begun is made. Not called for an accepted connection without TLS.
  virtual void on_connected(Connection&) {}
  /// Chooses where the payload is written: calls add_sink() for all of it, or drop_payload(). An error breaks the
  /// connection.
  virtual Result<void> on_head(Connection& connection, const MessageHead& head) = 0;
  /// Called when bytes of sink `part` have arrived, but only after want_pieces(). `ends`: these are the sink's last
  /// bytes.
  virtual void on_piece(Connection& /*connection*/, std::size_t /*part*/, std::span<const std::byte> /*bytes*/,
                        bool /*ends*/) {}
  /// Called when the whole message, including its payload, has arrived.
  virtual Result<void> on_message_end(Connection&) { return {}; }
  /// Appends at most one message: its head and its payload's parts. Returns false if there is nothing to send now.
  virtual bool next_message(Connection& /*connection*/, OutMessage& /*out*/) { return false; }
  virtual void on_broken(Connection& connection, const std::string& why) = 0;
};

/// A connection, whose methods never block. Its events are edge-triggered: after an event the socket counts as readable
/// or writable until a system call shows that it is not.
class Connection {
 public:
  Connection(std::uint64_t id, OwnedFd socket, MessageHandler& handler, bool is_connecting, TimeNs now);

  std::uint64_t id() const { return id_; }
  int fd() const { return socket_.get(); }
  bool is_closed() const { return socket_.get() < 0; }
  bool is_connecting() const { return is_connecting_; }
  MessageHandler& handler() { return *handler_; }
  void set_handler(MessageHandler& handler) { handler_ = &handler; }
  /// Returns the index that the handler has given to this connection.
  std::size_t lane() const { return lane_; }
  void set_lane(std::size_t lane) { lane_ = lane; }
  /// Makes the connection begin with a TLS handshake, before any message. Must be called before the first advance().
  void secure(std::unique_ptr<net::TlsSession> tls) {
    tls_ = std::move(tls);
    is_shaking_hands_ = true;
  }
  /// Returns whether the TLS handshake is not finished yet.
  bool is_shaking_hands() const { return is_shaking_hands_; }
  /// Returns TlsSession::key_name(), also once the connection goes on in clear text, or "" if there is no cluster key.
  const std::string& key_name() const { return tls_ != nullptr ? tls_->key_name() : key_name_; }
  /// Called when the peer has sent a valid Hello or Welcome: from then on its messages may hold longer texts.
  void trust() { text_bytes_max_ = kAnswerBytesMax; }

  /// Records whether this connection is in the backend's queue. Returns whether this changes the recorded value.
  bool mark_queued(bool is_queued) { return std::exchange(is_queued_, is_queued) != is_queued; }
  void on_ready(std::uint32_t epoll_events);
  /// Receives and sends a bounded amount. Returns whether there is more to do now.
  bool advance(TimeNs now);
  /// Sends the pending messages. Returns true if it stopped because `bytes_max` bytes were sent.
  bool flush(std::uint64_t bytes_max);
  /// Queues a message, which is sent before the next message of the handler.
  void send(const MessageHeader& header, std::string_view text = {}) { append_message(control_, header, text); }

  /// The next three functions may be called within MessageHandler::on_head() only.
  void add_sink(std::byte* to, std::uint64_t bytes) { sink_.push_back({to, bytes}); }
  void want_pieces() { wants_pieces_ = true; }
  void set_access(MemoryAccess access) { in_access_ = std::move(access); }
  /// From now on drops the rest of the payload that is being received.
  void drop_payload();
  /// If payload of this transfer is being sent, replaces the rest of it by zeros, so that the transfer's memory is no
  /// longer read.
  void send_zeros_for(std::uint64_t transfer);

  /// Reports the connection as broken to the handler.
  void fail(const std::string& why);
  /// Closes the socket and ends the connection's accesses to memory; the handler is not called.
  void close();

  /// Returns whether a message is partly received or something is not sent yet.
  bool is_in_the_middle() const {
    return payload_left_ > 0 || begin_ < end_ || out_left_ > 0 || !control_.empty() || has_unsent();
  }
  /// Returns when the peer last showed a sign of life: it sent something, or a call of this function found at least
  /// kSignOfLifeBytes (connection.cpp) newly acknowledged bytes. That the connection was made, and a call of
  /// reset_silence(), count as signs of life too. Queries the socket.
  TimeNs alive_at(TimeNs now);
  void reset_silence(TimeNs now) { alive_at_ = now; }

 private:
  /// Continues the TLS handshake. Returns whether it is done and messages may pass.
  bool shake_hands();
  ssize_t read_some(msghdr& message);
  ssize_t write_some(msghdr& message);
  bool has_unsent() const { return tls_ != nullptr && tls_->has_unsent(); }
  void receive(TimeNs now);
  void parse();
  bool parse_head();
  void accept_payload(std::uint64_t bytes);
  bool load_message();

  const std::uint64_t id_;
  OwnedFd socket_;
  std::unique_ptr<net::TlsSession> tls_;  // null: no TLS, or clear text after the handshake
  std::string key_name_;                  // set when tls_ is dropped after the handshake
  bool is_shaking_hands_ = false;
  MessageHandler* handler_;
  std::size_t lane_ = 0;
  bool is_connecting_;
  bool is_queued_ = false;
  bool is_readable_ = true;
  bool is_writable_ = true;
  bool is_hung_up_ = false;
  std::uint32_t text_bytes_max_ = kHelloBytesMax;

  std::vector<std::byte> buffer_;  // bytes [begin_, end_) are received and not parsed yet
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::size_t wanted_ = sizeof(MessageHeader);
  std::vector<iovec> sink_;  // where the rest of the incoming payload is written
  std::size_t sink_at_ = 0;
  std::uint64_t payload_left_ = 0;
  bool is_in_message_ = false;
  bool is_dropping_ = false;
  bool wants_pieces_ = false;
  MemoryAccess in_access_;

  std::string control_;
  OutMessage out_;
  std::size_t out_at_ = 0;
  std::uint64_t out_left_ = 0;

  TimeNs alive_at_;
  std::uint64_t num_sent_ = 0;
  std::uint64_t num_acknowledged_ = 0;
};

}  // namespace kvferry::tcp
