// The connection to one peer: its endpoint from the hello to the close. Private to this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "transport/transport.h"
#include "transport/ucx/messages.h"
#include "transport/ucx/ucp_worker.h"

namespace kvferry::ucx {

using RkeyPtr = std::shared_ptr<ucp_rkey>;

/// One peer's endpoint. Not movable: UCX holds `this` as the error callback's argument. Used by the progress thread
/// only. Closing takes several progress() calls: the backend calls advance_close() until is_closed(), and never blocks.
class UcxPeer {
 public:
  /// `token`: random and sent to this peer only, so that no other peer can send a welcome or a pong in its name.
  UcxPeer(UcpWorker& worker, PeerId id, Address address, std::uint64_t token)
      : worker_(worker), id_(id), address_(std::move(address)), token_(token) {}
  UcxPeer(const UcxPeer&) = delete;
  UcxPeer& operator=(const UcxPeer&) = delete;
  ~UcxPeer();

  /// Creates the endpoint and sends the hello; does nothing from the second call on.
  void connect();
  /// Handles the answer to the hello.
  void on_welcome(const Welcome& welcome);
  /// Returns whether the peer has accepted the hello and nothing has failed since. Only then may transfers be posted.
  bool is_ready() const { return state_ == State::kReady; }
  bool is_failed() const { return state_ == State::kFailed || state_ == State::kClosed; }
  /// Returns whether the endpoint is gone, so that UCX no longer touches memory for this peer.
  bool is_closed() const { return state_ == State::kClosed; }

  /// Records a sign of life: the peer has answered, or an operation has finished.
  void note_life(TimeNs now) { alive_at_ = now; }
  /// Pings a peer that owes an answer and is silent; fails the connection after `silence_ns`.
  void watch(TimeNs now, TimeNs silence_ns);
  /// Returns when watch() must be called next, or 0 for never.
  TimeNs watch_deadline(TimeNs silence_ns) const;

  /// Ends the connection; only the first call's reason is kept. advance_close() makes UCX cancel the posted operations.
  void fail(std::string why);
  /// Flushes everything that is posted, notifications included, and then fails the connection. Fails it at `deadline`
  /// at the latest.
  void drain(TimeNs deadline);
  void advance_close(TimeNs now);
  bool is_draining() const { return drain_deadline_ != 0 && !is_closed(); }
  TimeNs drain_deadline() const { return drain_deadline_; }

  /// Unpacks a remote key. The result may outlive this connection. Precondition: is_ready().
  Result<RkeyPtr> rkey(const std::string& packed);
  /// Returns whether small blocks are better sent in packed messages: UCX emulates one-sided operations by messages on
  /// this connection, or the names of the connection's transports are unknown.
  bool prefers_packing() const { return prefers_packing_; }
  /// Returns Completion::path of transfers with this peer.
  std::string_view path() const { return is_tcp_alone_ ? "ucx/tcp" : ""; }
  /// Returns the names of the UCX transports in use, comma-separated, such as "tcp/eth0", or "unknown".
  std::string transports() const;

  PeerId id() const { return id_; }
  std::uint64_t token() const { return token_; }
  const std::string& secret() const { return address_.secret; }
  ucp_ep_h ep() const { return ep_; }
  const std::string& why() const { return why_; }
  std::uint32_t num_transfers = 0;   // number of transfers with this peer
  std::uint32_t num_posted = 0;      // number of operations with this peer that UCX has not finished
  std::uint32_t num_unanswered = 0;  // number of BlocksMessages to this peer without an answer

 private:
  enum class State { kIdle, kConnecting, kReady, kFailed, kClosed };
  /// Returns when a silent peer must be pinged, or its connection must be failed.
  TimeNs silence_deadline(TimeNs silence_ns) const;

  UcpWorker& worker_;
  const PeerId id_;
  const Address address_;
  const std::uint64_t token_;
  State state_ = State::kIdle;
  ucp_ep_h ep_ = nullptr;
  std::string why_;
  std::string hello_;  // read by UCX until hello_request_ is done
  TimeNs drain_deadline_ = 0;
  TimeNs alive_at_ = 0;  // time of the last sign of life, or time at which the peer began to owe an answer
  TimeNs pinged_at_ = 0;
  TimeNs watched_at_ = 0;  // time of the last call of watch()
  bool owed_ = false;
  bool prefers_packing_ = false, is_tcp_alone_ = false;
  ucs_status_ptr_t hello_request_ = nullptr;
  ucs_status_ptr_t flush_request_ = nullptr;
  ucs_status_ptr_t close_request_ = nullptr;
  std::unordered_map<std::string, RkeyPtr> rkeys_;
};

}  // namespace kvferry::ucx
