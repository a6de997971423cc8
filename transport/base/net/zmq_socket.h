// ZeroMQ sockets. ZeroMQ's own headers are included only by sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "transport/base/clock.h"
#include "transport/base/net/event_fd.h"
#include "transport/base/net/spare_fd.h"
#include "transport/base/net/zmq_context.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::net {

/// One part of a message. The bytes belong to ZeroMQ.
class ZmqPart {
 public:
  ZmqPart();
  ~ZmqPart();
  ZmqPart(const ZmqPart&) = delete;
  ZmqPart& operator=(const ZmqPart&) = delete;
  std::string_view bytes() const;

 private:
  friend class ZmqSocket;
  alignas(void*) mutable std::byte message_[64];  // zmq_msg_t
};

enum class ZmqKind {
  kRouter,      // a server; the first part of a message is the peer's routing id; send() fails if the peer is gone
  kDealer,      // a client of one server
  kSubscriber,  // receives the messages of all topics from a publisher
};

struct ZmqOptions {
  // Limit on the bytes of each part of a message. A peer that exceeds the limit is disconnected. -1: unlimited.
  std::int64_t message_bytes_max = std::int64_t{64} << 20;
  int receive_queue_max = 1000;    // limit on received messages that wait, for each peer
  int send_queue_max = 1000;       // limit on messages that wait to be sent, for each peer
  int connect_timeout_ms = 0;      // time limit of a connection attempt; 0: the kernel's limit
  bool queues_unconnected = true;  // whether send() accepts messages while there is no connection
};

/// A ZeroMQ socket. It follows the cluster key of its context, as long as its owner calls receive(). It supports IPv4
/// and IPv6, has keepalive, and closes without waiting for unsent messages unless set_linger() is called. No call
/// blocks or throws. Threads: one owner.
class ZmqSocket {
 public:
  /// Makes a socket. kUnavailable: no file descriptor is left, or the context has too many sockets.
  static Result<std::unique_ptr<ZmqSocket>> make(std::shared_ptr<ZmqContext> context, ZmqKind kind,
                                                 ZmqOptions options = {});
  ~ZmqSocket();
  ZmqSocket(const ZmqSocket&) = delete;
  ZmqSocket& operator=(const ZmqSocket&) = delete;

  /// Listens on tcp://HOST:PORT or, for this user alone, ipc://PATH. HOST: "*" (all interfaces), a numeric address, an
  /// interface or "localhost"; port 0 selects a free port. kUnavailable: the address cannot be bound, no descriptor
  /// is left, or this libzmq has no CURVE or, for ipc://, no ZMQ_IPC_FILTER_UID. kInvalidArgument: the process has a
  /// member's key, which isn't enough to listen here.
  Result<void> bind(std::string endpoint);
  /// Connects in the background, and again whenever the connection breaks. A host name is resolved to an IPv4 address.
  /// kInvalidArgument: `endpoint` is malformed. kUnavailable: this libzmq has no CURVE, or no descriptor is left.
  Result<void> connect(const std::string& endpoint);
  /// Drops the connection that connect() made and starts a new one, with the same cluster key. A host name is resolved
  /// to IPv6 and IPv4 addresses in turn, because ZeroMQ resolves a name to only one of the two kinds at a time.
  Result<void> reconnect();
  /// Returns the endpoint that bind() opened or connect() received, e.g. "tcp://127.0.0.1:41234".
  const std::string& endpoint() const { return endpoint_; }
  const std::shared_ptr<ZmqContext>& context() const { return context_; }

  /// Returns a descriptor that is readable if a message has arrived since receive() returned 0. Until receive() returns
  /// 0, the descriptor may be unreadable although messages wait; each send() of a dealer makes it readable then.
  int fd() const;

  /// Sends one message of one or more parts. Returns false, and drops the message, if the queue has no room, or if
  /// there is no connection and the socket is a router or was made without ZmqOptions::queues_unconnected.
  bool send(std::string_view part) { return send(std::span(&part, 1)); }
  bool send(std::span<const std::string_view> parts);

  /// Receives one message into `parts` and returns its number of parts, or 0 if no message waits. Parts that exceed
  /// `parts.size()` are dropped.
  std::size_t receive(std::span<ZmqPart> parts);

  /// Returns who sent a message. `parts`: all parts of the message that receive() has returned. The role kNone: the
  /// sender's key is no longer accepted; the caller must ignore the message, and this call tries to end the connection.
  /// An admin without a name: the holder of the cluster key, or any peer if the socket needs no key.
  Identity sender_of(std::span<const ZmqPart> parts) const;
  /// Returns the sender's public CURVE key in hexadecimal if there is a list of members, otherwise an empty text.
  /// `parts`: as for sender_of(), which must have accepted the sender.
  std::string curve_key_of(std::span<const ZmqPart> parts) const;

  /// Sets how long closing waits for unsent messages.
  void set_linger(int ms);

  /// Returns how many connections to a router that listens on tcp:// have failed in ZeroMQ's handshake. Only calls of
  /// receive() count them.
  std::uint64_t num_handshakes_failed() const { return num_handshakes_failed_; }

  enum class Change { kNone, kConnected, kDisconnected };
  /// Returns a monitor, which is a socket that receives a message whenever this socket connects or disconnects. A
  /// socket can have only one monitor. The caller must destroy the monitor before the monitored socket.
  Result<std::unique_ptr<ZmqSocket>> make_monitor();
  /// Returns the next change that a monitor reports; kNone if no message waits.
  Change next_change();

 private:
  ZmqSocket(std::shared_ptr<ZmqContext> context, int type);
  Result<void> set_up(ZmqKind kind, const ZmqOptions& options);
  void report_pending();
  Result<std::unique_ptr<ZmqSocket>> monitor(int events);
  Result<void> start_watching(int events);
  void watch_connections();
  Result<void> connect_again();
  /// Called if the socket has a cluster key. A router listens anew if the key that it was bound with is not in use any
  /// more, which ends its connections. A client connects anew if its key is not accepted any more. If
  /// `was_refused`, i.e. a handshake has failed, a client connects anew with the other accepted key.
  void follow_key(bool was_refused);
  void listen_again(std::uint64_t version);
  struct Event {
    int type = 0;
    int value = 0;
  };
  std::optional<Event> next_event();

  std::shared_ptr<ZmqContext> context_;  // shared, so that it outlives the socket
  void* handle_;
  std::string endpoint_;
  void* monitored_ = nullptr;  // the socket whose monitor this is
  bool is_ipv6_ = false;
  bool is_router_ = false;
  bool is_drained_ = true;  // whether the last receive() found no message, so that fd() must report the next message
  // Sending may consume the event that makes ZeroMQ's descriptor readable, so a socket that sends has a second
  // descriptor.
  std::optional<EventFd> pending_;
  bool is_pending_ = false;
  OwnedFd epoll_;  // waits for ZeroMQ's descriptor, pending_ and the monitor below
  // A router on tcp:// has a monitor of its own, by which it ends new connections when few descriptors are left: with
  // none left, ZeroMQ's thread would never sleep while a connection waits to be accepted. A client has a monitor while
  // it accepts two cluster keys: it tries the other key when a handshake has failed.
  std::unique_ptr<ZmqSocket> connections_;
  std::string key_;  // the server's public CURVE key, at both ends; "": the socket needs no key
  std::uint64_t key_version_ = 0;
  bool is_unbound_ = false;  // whether a router waits to listen anew
  // When the socket last changed its key after a refusal, or began to listen anew. After listen_again() has logged its
  // failure: the largest value.
  TimeNs changed_at_ = 0;
  FdReserve reserve_;
  std::uint32_t num_receives_ = 0;
  std::uint64_t num_handshakes_failed_ = 0;
};

}  // namespace kvferry::net
