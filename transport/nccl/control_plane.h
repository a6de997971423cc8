// The control link: sends messages between NCCL transports as notifications of an inner TCP transport, reliably and in
// order, and detects dead peers. Private to this folder.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/make_transport.h"
#include "transport/nccl/messages.h"

namespace kvferry::nccl {

/// The connection to one peer, shared by all sessions with it. A lost connection stays lost.
class ControlPeer {
 public:
  bool is_lost() const { return is_lost_; }
  const std::string& why() const { return why_; }
  /// Returns when the peer last acknowledged a message or, before that, when the connection was made.
  TimeNs alive_at() const { return alive_at_; }
  bool is_flushed() const { return queue_.empty() && num_sent_ == 0; }

 private:
  friend class ControlPlane;
  ControlAddress address_;
  PeerId id_;
  std::string stream_;             // distinguishes the messages of this connection from those of an earlier one
  std::deque<std::string> queue_;  // message parts not submitted to the inner transport yet
  std::size_t num_sent_ = 0;       // number of message parts submitted and not completed
  TimeNs alive_at_ = 0;
  bool is_lost_ = false;
  std::string why_;
};
using ControlPeerPtr = std::shared_ptr<ControlPeer>;

/// The control link of one transport. Threads: any thread may call open(), address() and describe(); only the progress
/// thread calls the other methods.
class ControlPlane {
 public:
  /// Opens the TCP transport that carries the control link. Errors: those of make_tcp_transport().
  static Result<std::unique_ptr<ControlPlane>> open(const TcpOptions& options);

  const ControlAddress& address() const { return address_; }
  std::string describe() const { return inner_->describe(); }
  /// Returns a descriptor that is readable while advance() has something to read.
  int event_fd() const { return inner_->event_fd(); }

  /// Returns the connection to this address. If there is none or it is lost, makes a new one. If the inner transport
  /// refuses the address, the new connection is lost from the start. A connection is closed when it is lost, or when
  /// only this object refers to it and all its messages are sent.
  ControlPeerPtr reach(const ControlAddress& address, TimeNs now);
  void send(ControlPeer& peer, const std::string& message);

  struct Incoming {
    std::string from;  // the sender's ControlAddress::address
    std::string message;
    std::optional<std::string> member = {};  // Notification::member
  };
  std::vector<Incoming> advance(TimeNs now);
  bool is_flushed() const;
  void shut_down() { inner_->shutdown(); }

 private:
  explicit ControlPlane(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  void submit_queued(const ControlPeerPtr& peer);
  void lose(ControlPeer& peer, const std::string& why);
  void receive(Notification note, TimeNs now, std::vector<Incoming>& incoming);

  // A transfer of inner_ needs a region, even if it only carries a notification. These bytes are never used.
  std::array<std::byte, 64> memory_{};
  std::unique_ptr<Transport> inner_;
  RegionId region_;
  ControlAddress address_;
  std::vector<ControlPeerPtr> peers_;
  std::unordered_map<TransferId, ControlPeerPtr> sent_;
  struct Partial {
    std::string stream;
    std::string bytes;
    TimeNs since = 0;
    bool is_dropped = false;  // the message is too long; its parts up to the last one are dropped
  };
  // Messages whose last parts are missing. Key: the sender's member and address.
  std::map<std::pair<std::optional<std::string>, std::string>, Partial> partial_;
};

}  // namespace kvferry::nccl
