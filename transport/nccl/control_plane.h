// The control link: messages to and from other NCCL transports, over a transport of its own that carries no bytes of
// memory. Reliable and in order; a dead peer is seen. Private to this folder.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "transport/base/clock.h"
#include "transport/make_transport.h"
#include "transport/nccl/messages.h"

namespace kvferry::nccl {

/// One way to a peer, shared by all sessions with it. Once lost it stays so.
class ControlPeer {
 public:
  bool is_lost() const { return is_lost_; }
  const std::string& why() const { return why_; }
  /// When it last took a message, or was first reached.
  TimeNs heard_at() const { return heard_at_; }
  bool is_flushed() const { return queue_.empty() && num_sent_ == 0; }

 private:
  friend class ControlPlane;
  ControlAddress address_;
  PeerId id_;
  std::string stream_;             // tells the messages of this way from those of an earlier one
  std::deque<std::string> queue_;  // what is not handed over yet
  std::size_t num_sent_ = 0;       // handed over and not known to be there
  TimeNs heard_at_ = 0;
  bool is_lost_ = false;
  std::string why_;
};
using ControlPeerPtr = std::shared_ptr<ControlPeer>;

/// Progress thread only, but for open().
class ControlPlane {
 public:
  /// kUnavailable: as make_tcp_transport().
  static Result<std::unique_ptr<ControlPlane>> open(const TcpOptions& options);

  const ControlAddress& address() const { return address_; }
  std::string describe() const { return inner_->describe(); }
  /// Readable while advance() has something to read.
  int event_fd() const { return inner_->event_fd(); }

  /// The way to this address; a new one if the last was lost. It closes when nobody else holds it and all is sent. A
  /// malformed address gives one that is lost.
  ControlPeerPtr reach(const ControlAddress& address, TimeNs now);
  void send(ControlPeer& peer, std::string message);

  struct Incoming {
    std::string from;  // the sender's ControlAddress::address
    std::string message;
  };
  std::vector<Incoming> advance(TimeNs now);
  bool is_flushed() const;
  void shut_down() { inner_->shutdown(); }

 private:
  explicit ControlPlane(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  void hand_over(const ControlPeerPtr& peer);
  void lose(ControlPeer& peer, const std::string& why);
  void receive(Notification note, std::vector<Incoming>& incoming);

  std::array<std::byte, 64> memory_{};  // of the region that stands in all transfers; never read or written
  std::unique_ptr<Transport> inner_;
  RegionId region_;
  ControlAddress address_;
  std::vector<ControlPeerPtr> peers_;
  std::unordered_map<TransferId, ControlPeerPtr> sent_;
  struct Partial {
    std::string stream;
    std::string bytes;
  };
  std::unordered_map<std::string, Partial> partial_;  // by sender: the message that is on its way in parts
};

}  // namespace kvferry::nccl
