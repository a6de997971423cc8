// What both ends of a session have: its way to the peer, its two channels, and how it ends. Private to this folder.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/nccl/channel.h"
#include "transport/nccl/control_plane.h"
#include "transport/nccl/messages.h"

namespace kvferry::nccl {

/// What links need of their transport.
struct Context {
  const NcclOptions& options;
  Device& device;
  StagingPool& staging;
  Communicators& communicators;
  ControlPlane& control;
  TransferTable& transfer_table;
  std::string signature;  // who notifications are from
  TimeNs now = 0;         // of this round
};

/// A session is made by the initiator of transfers and carries its transfers alone: pulls through one channel, pushes
/// through another, each opened when it is first wanted. Progress thread only.
class Link {
 public:
  Link(Context& context, std::uint64_t session, ControlPeerPtr peer)
      : context_(context), session_(session), peer_(std::move(peer)) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  std::uint64_t session() const { return session_; }
  /// Of this session. An Error: the peer breaks the rules.
  virtual Result<void> on_message(const Message& message) = 0;
  /// A round of work.
  void advance();
  /// Ends it; what is under way is aborted.
  void lose(const std::string& why, bool tells_peer = true);
  bool is_lost() const { return is_lost_; }
  /// Lost, and nothing of it touches memory any more.
  bool is_quiet() const;
  /// The device does something for it, which announces itself to nobody.
  virtual bool needs_polling() const;
  /// When advance() is wanted although nothing happens.
  TimeNs next_deadline() const;

 protected:
  /// The rest of a round; `is_pull` says of which channel the reports are.
  virtual void on_report(bool is_pull, Channel::Report& report) = 0;
  virtual void advance_work() = 0;
  virtual void on_lost(const std::string& why) = 0;
  /// The peer owes something, or may leave something of ours waiting.
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
