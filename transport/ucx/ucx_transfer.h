// One accepted transfer on its way: copies, flush, notification, outcome. Private to this folder.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/make_transport.h"
#include "transport/ucx/packed.h"
#include "transport/ucx/ucx_peer.h"

namespace kvferry::ucx {

/// UCX's handle of a local region and, for GPU memory, who takes checksums of it.
struct LocalMemory {
  ucp_mem_h handle = nullptr;
  ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
  Device* device = nullptr;
  DeviceStream stream = nullptr;
};

/// Its bytes go by one-sided operations on the peer's memory, or packed in messages that the peer serves.
/// Not movable: UCX holds `this` as the callbacks' argument. Progress thread only. The peer and the book outlive it.
class UcxTransfer {
 public:
  UcxTransfer(const UcxOptions& options, UcxPeer& peer, AskedBook& asked, AcceptedTransfer accepted,
              const LocalMemory& local_memory);
  UcxTransfer(const UcxTransfer&) = delete;
  UcxTransfer& operator=(const UcxTransfer&) = delete;
  ~UcxTransfer();

  void feed(FedCopies fed);
  /// Posts what may be posted now. `own_address` signs the notification.
  void advance(TimeNs now, UcpWorker& worker, const std::string& own_address);
  /// To a message of this transfer; `pieces` is what was asked in it.
  void on_answer(const std::vector<Piece>& pieces, const BlocksAnswer& answer, std::string_view payload);
  /// Nothing is posted any more and the outcome is known.
  bool is_over() const;
  /// A GPU reads the local memory.
  bool is_hashing() const { return hashes_ != nullptr; }
  void cancel(TimeNs now);
  /// When this transfer, cancelled and without any progress, should take its connection down; 0: never.
  TimeNs stuck_deadline() const;

  TransferId id() const { return accepted_.id; }
  Priority priority() const { return accepted_.priority; }
  UcxPeer& peer() const { return peer_; }
  /// The outcome; only when is_over().
  ErrorCode code() const;
  std::string what() const;
  std::vector<std::uint32_t> corrupt_ranges() const;

 private:
  enum class Phase { kCopying, kFlushing, kDone };
  enum class Mode { kUndecided, kOneSided, kPacked };

  bool may_post() const;
  Mode choose_mode() const;
  bool is_pull() const { return accepted_.direction == Direction::kPull; }
  bool is_all_posted() const { return accepted_.is_complete && next_copy_ == accepted_.copies.size(); }
  /// The next bytes to move, at most `bytes_max` of one copy.
  Piece take_piece(std::uint64_t bytes_max);
  void post_operations();
  void post_messages(UcpWorker& worker, const std::string& own_address);
  void post_flush();
  void post_notification(UcpWorker& worker, const std::string& own_address);
  /// Counts one posted operation, or takes its outcome if UCX already knows it.
  void account(ucs_status_ptr_t posted);
  void retire(ucs_status_t status);
  /// Bytes of a checked pull are here: the last of a range has it checked.
  void arrived(const Piece& piece);
  void check(std::size_t copy);
  /// Takes the checksums of GPU memory, all at the end; true: they are known, or there are none to take.
  bool check_device();
  ucp_request_param_t request_param();

  const UcxOptions& options_;
  UcxPeer& peer_;
  AskedBook& asked_;
  AcceptedTransfer accepted_;
  const LocalMemory local_memory_;
  RkeyPtr rkey_;
  Mode mode_ = Mode::kUndecided;
  Phase phase_ = Phase::kCopying;
  std::size_t next_copy_ = 0;
  std::uint64_t next_copy_done_bytes_ = 0;  // of copies[next_copy_], already posted
  std::uint32_t num_posted_ = 0;
  std::uint32_t num_asked_ = 0;
  bool has_announced_ = false;                // in a message that had all of its bytes
  std::vector<std::uint64_t> missing_bytes_;  // of a checked pull, one a copy
  std::vector<std::uint32_t> corrupt_;
  std::unique_ptr<Device::Checksums> hashes_;
  bool is_device_checked_ = false;
  std::string failure_;  // of this transfer alone, on a sound connection
  ErrorCode failure_code_ = ErrorCode::kInternal;
  TimeNs cancelled_at_ = 0;
  TimeNs progressed_at_ = 0;
  bool has_retired_ = false;  // something retired since the last advance()
};

}  // namespace kvferry::ucx
