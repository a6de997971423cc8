// One accepted transfer on its way: copies, flush, notification, outcome. Private to this folder.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>

#include "transport/ledger.h"
#include "transport/make_transport.h"
#include "transport/ucx/ucx_peer.h"

namespace kvferry::ucx {

/// Not movable: UCX holds `this` as the callbacks' argument. Progress thread only. The peer outlives it.
class UcxTransfer {
 public:
  UcxTransfer(const UcxOptions& options, UcxPeer& peer, AcceptedTransfer accepted, ucp_mem_h local_memory);
  UcxTransfer(const UcxTransfer&) = delete;
  UcxTransfer& operator=(const UcxTransfer&) = delete;
  ~UcxTransfer();

  /// Posts what may be posted now. `own_address` signs the notification.
  void advance(TimeNs now, const std::string& own_address);
  /// Nothing is posted any more and the outcome is known.
  bool is_over() const;
  void cancel(TimeNs now);
  /// When this transfer, cancelled and without any progress, should take its connection down; 0: never.
  TimeNs stuck_deadline() const;

  TransferId id() const { return accepted_.id; }
  UcxPeer& peer() const { return peer_; }
  /// The outcome; only when is_over().
  ErrorCode code() const;
  std::string what() const;

 private:
  enum class Phase { kCopying, kFlushing, kNotifying, kDone };

  bool may_post() const;
  void post_copies();
  void post_flush();
  void post_notification(const std::string& own_address);
  /// Counts one posted operation, or takes its outcome if UCX already knows it.
  void account(ucs_status_ptr_t posted);
  void retire(ucs_status_t status);
  ucp_request_param_t request_param();

  const UcxOptions& options_;
  UcxPeer& peer_;
  const AcceptedTransfer accepted_;
  const ucp_mem_h local_memory_;
  RkeyPtr rkey_;
  Phase phase_ = Phase::kCopying;
  std::size_t next_copy_ = 0;
  std::uint64_t next_copy_done_bytes_ = 0;  // of copies[next_copy_], already posted
  std::uint32_t num_posted_ = 0;
  std::string message_;  // read by UCX while kNotifying
  std::string failure_;  // of this transfer alone, on a sound connection
  TimeNs cancelled_at_ = 0;
  TimeNs progressed_at_ = 0;
  bool has_retired_ = false;  // something retired since the last advance()
};

}  // namespace kvferry::ucx
