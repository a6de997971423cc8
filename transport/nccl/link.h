// Base class of both ends of a session: has the control connection and two channels, and ends the session. Private to
// this folder.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/make_transport.h"
#include "transport/nccl/channel.h"
#include "transport/nccl/control_plane.h"
#include "transport/nccl/messages.h"
#include "transport/transfer_table.h"

namespace kvferry::nccl {

/// The objects of the backend that its links use.
struct Context {
  const NcclOptions& options;
  Device& device;
  StagingPool& staging;
  Communicators& communicators;
  ControlPlane& control;
  TransferTable& transfer_table;
  std::string source_address;  // `from` in the notifications that this node sends
  TimeNs now = 0;              // time at which the progress thread began its current round
};

/// One end of a session. A session is opened by the initiator of transfers and carries only the initiator's transfers:
/// pulls through one channel, pushes through another, each opened when it is first needed. Used by the progress thread
/// only.
class Link {
 public:
  Link(Context& context, std::uint64_t session, ControlPeerPtr peer)
      : context_(context), session_(session), peer_(std::move(peer)) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  std::uint64_t session() const { return session_; }
  /// Handles a message of this session. The caller must end the session after an error, such as a peer's violation of
  /// the protocol.
  virtual Result<void> on_message(const Message& message) = 0;
  /// Does the work that is due: pings the peer, advances the channels and this end's requests.
  void advance();
  /// Ends the session and aborts all pieces that are under way.
  void lose(const std::string& why, bool notify_peer = true);
  bool is_lost() const { return is_lost_; }
  /// Returns true if the session is lost and no longer touches memory.
  bool is_quiet() const;
  /// Returns whether a communicator or the device works for this link, so that their progress must be polled.
  virtual bool needs_polling() const;
  /// Returns the time at which advance() must be called even if nothing happens before that time.
  TimeNs next_deadline() const;

 protected:
  /// Handles a channel's report. `is_pull`: whether it is the channel for pulls.
  virtual void on_report(bool is_pull, Channel::Report& report) = 0;
  virtual void advance_work() = 0;
  virtual void on_lost(const std::string& why) = 0;
  /// Returns true if work is pending that needs a live peer; the peer is then pinged more often.
  virtual bool is_owed() const = 0;

  template <class Body>
  void send(Kind kind, const Body& body) {
    context_.control.send(*peer_, pack_message(session_, kind, encode(body)));
  }
  Channel* channel(bool is_pull) const { return channels_[is_pull ? 0 : 1].get(); }
  Result<void> open_channel(bool is_pull, const std::string& id, int rank, Role role);

  Context& context_;

 private:
  void watch();
  TimeNs ping_at() const;

  const std::uint64_t session_;
  const ControlPeerPtr peer_;
  std::array<std::unique_ptr<Channel>, 2> channels_;
  TimeNs pinged_at_ = 0;
  bool is_lost_ = false;
};

}  // namespace kvferry::nccl
