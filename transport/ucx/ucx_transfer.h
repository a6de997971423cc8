// One accepted transfer in progress: copies, flush, notification, outcome. Private to this folder.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/make_transport.h"
#include "transport/piece_cursor.h"
#include "transport/range_verifier.h"
#include "transport/transfer_table.h"
#include "transport/ucx/packed.h"
#include "transport/ucx/ucx_peer.h"

namespace kvferry::ucx {

/// UCX's handle of a local region and, for GPU memory, the device and stream that hash it.
struct LocalMemory {
  ucp_mem_h handle = nullptr;
  ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
  Device* device = nullptr;
  DeviceStream stream = nullptr;
};

/// A transfer's bytes are moved by one-sided operations on the peer's memory, or in messages that the peer serves. Not
/// movable: UCX holds `this` as the callbacks' argument. Used by the progress thread only. The constructor's reference
/// arguments, except `local_memory`, must outlive this object.
class UcxTransfer {
 public:
  UcxTransfer(const UcxOptions& options, UcxPeer& peer, PendingMessages& pending, AcceptedTransfer accepted,
              const LocalMemory& local_memory);
  UcxTransfer(const UcxTransfer&) = delete;
  UcxTransfer& operator=(const UcxTransfer&) = delete;
  ~UcxTransfer();

  void feed(const FedCopies& more) { accepted_.append(more); }
  /// Posts operations and messages as far as the limits allow. `from`: the source address of the notification.
  void advance(TimeNs now, UcpWorker& worker, const std::string& from);
  /// Handles the answer to a message of this transfer that named `pieces`.
  void on_answer(const std::vector<LocalPiece>& pieces, const BlocksAnswer& answer, std::string_view payload);
  /// Returns whether the outcome is known and UCX no longer touches the local memory.
  bool is_over() const;
  /// Returns whether a GPU may still be reading the local memory.
  bool is_hashing() const { return verifier_.is_hashing(); }
  void cancel(TimeNs now);
  /// Returns when this transfer must end its connection because it is cancelled and makes no progress; 0: never.
  TimeNs stuck_deadline() const;

  TransferId id() const { return accepted_.id; }
  Priority priority() const { return accepted_.priority; }
  UcxPeer& peer() const { return peer_; }
  /// The next three functions return the outcome. Precondition: is_over().
  ErrorCode code() const;
  std::string what() const;
  std::vector<std::uint32_t> corrupt_ranges() const;

 private:
  enum class Phase { kCopying, kFlushing, kDone };
  enum class Mode { kUndecided, kOneSided, kPacked };

  bool may_post() const;
  Mode choose_mode() const;
  bool is_pull() const { return accepted_.is_pull(); }
  bool is_all_posted() const { return accepted_.is_complete && cursor_.is_at_end(accepted_.copies); }
  /// Takes the next piece of one copy, at most `bytes_max` bytes. If is_hashed_here(), taking the first piece of a
  /// push's copy also verifies the checksum of the copy's whole local range.
  LocalPiece take_piece(std::uint64_t bytes_max);
  bool is_hashed_here() const { return accepted_.has_checksums() && local_memory_.device == nullptr; }
  void post_operations();
  void post_messages(UcpWorker& worker, const std::string& from);
  void post_flush();
  void post_notification(UcpWorker& worker, const std::string& from);
  /// Counts a posted operation, or handles its outcome if UCX has it already.
  void account(ucs_status_ptr_t posted);
  void retire(ucs_status_t status);
  /// Counts arrived bytes of a checked pull; the last ones of a range trigger the comparison of its checksum.
  void arrived(const LocalPiece& piece);
  /// Hashes GPU memory when all bytes have moved. Returns whether the hashing is finished or not needed.
  bool verify_on_device();
  ucp_request_param_t request_param();

  const UcxOptions& options_;
  UcxPeer& peer_;
  PendingMessages& pending_messages_;
  AcceptedTransfer accepted_;
  const LocalMemory local_memory_;
  RkeyPtr rkey_;
  Mode mode_ = Mode::kUndecided;
  Phase phase_ = Phase::kCopying;
  RangeVerifier verifier_{accepted_};
  PieceCursor cursor_;  // position up to which bytes are posted
  std::uint32_t num_posted_ = 0;
  std::uint32_t num_unanswered_ = 0;  // number of BlocksMessages without an answer
  bool has_notified_ = false;         // the message that carried all bytes also carried the notification
  bool is_verified_on_device_ = false;
  std::string failure_;  // reason why this transfer has failed although the connection works
  ErrorCode failure_code_ = ErrorCode::kInternal;
  TimeNs cancelled_at_ = 0;
  TimeNs progressed_at_ = 0;
  bool has_retired_ = false;  // an operation or a message ended since the last advance()
};

}  // namespace kvferry::ucx
