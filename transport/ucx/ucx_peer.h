// One connection of the progress thread: its endpoint from the first hello to the close. Private to this folder.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>

#include "transport/transport.h"
#include "transport/ucx/messages.h"
#include "transport/ucx/ucp_worker.h"

namespace kvferry::ucx {

using RkeyPtr = std::shared_ptr<ucp_rkey>;

/// Not movable: UCX holds `this` as the error callback's argument. Progress thread only.
/// Closing takes several progress() calls: the engine calls advance_close() until is_closed(); nobody waits.
class UcxPeer {
 public:
  UcxPeer(UcpWorker& worker, PeerId id, Address address) : worker_(worker), id_(id), address_(std::move(address)) {}
  UcxPeer(const UcxPeer&) = delete;
  UcxPeer& operator=(const UcxPeer&) = delete;
  ~UcxPeer();

  /// Makes the endpoint and says hello; does nothing from the second call on.
  void connect();
  /// The answer to the hello.
  void on_welcome(const Welcome& welcome);
  /// Hello is answered and nothing has failed since: transfers may be posted.
  bool is_ready() const { return state_ == State::kReady; }
  bool is_failed() const { return state_ == State::kFailed || state_ == State::kClosed; }
  /// No endpoint is left, so nothing of UCX touches memory for this peer any more.
  bool is_closed() const { return state_ == State::kClosed; }

  /// Any sign of life: an answer, a finished operation.
  void heard(TimeNs now) { heard_at_ = now; }
  /// Asks a peer that owes something and says nothing for a sign of life, and gives it up after `silence_ns`.
  void watch(TimeNs now, TimeNs silence_ns);
  /// When watch() is wanted next; 0: not by itself.
  TimeNs watch_deadline(TimeNs silence_ns) const;

  /// Ends the connection; later calls keep the first story. What is posted is cancelled by UCX.
  void fail(std::string why);
  /// Flushes what was posted first, notifications included, and fails the connection at `deadline` at the latest.
  void drain(TimeNs deadline);
  void advance_close(TimeNs now);
  bool is_draining() const { return drain_deadline_ != 0 && !is_closed(); }
  TimeNs drain_deadline() const { return drain_deadline_; }

  /// The key stays valid while somebody holds it. Must be ready.
  Result<RkeyPtr> rkey(const std::string& packed);
  /// Small blocks are better sent in packed messages: one-sided operations are emulated, each at the cost of a message.
  bool prefers_packing() const { return prefers_packing_; }
  /// "tcp/eth0"-like names of what carries the bytes, comma-separated.
  std::string transports() const;

  PeerId id() const { return id_; }
  ucp_ep_h ep() const { return ep_; }
  const std::string& why() const { return why_; }
  std::uint32_t num_transfers = 0;  // that refer to this peer
  std::uint32_t num_posted = 0;     // operations of all transfers with this peer that UCX has not finished
  std::uint32_t num_asked = 0;      // BlocksMessages of all transfers with this peer without an answer

 private:
  enum class State { kIdle, kConnecting, kReady, kFailed, kClosed };
  std::set<std::string> lanes() const;
  /// When a peer that owes something and stays silent is asked, or given up.
  TimeNs verdict_at(TimeNs silence_ns) const;

  UcpWorker& worker_;
  const PeerId id_;
  const Address address_;
  State state_ = State::kIdle;
  ucp_ep_h ep_ = nullptr;
  std::string why_;
  std::string hello_;  // read by UCX until hello_request_ is done
  TimeNs drain_deadline_ = 0;
  TimeNs heard_at_ = 0;  // or began to owe something
  TimeNs pinged_at_ = 0;
  TimeNs watched_at_ = 0;  // when watch() was called last
  bool owed_ = false;
  bool prefers_packing_ = false;
  ucs_status_ptr_t hello_request_ = nullptr;
  ucs_status_ptr_t flush_request_ = nullptr;
  ucs_status_ptr_t close_request_ = nullptr;
  std::unordered_map<std::string, RkeyPtr> rkeys_;
};

}  // namespace kvferry::ucx
