// The backend of mapped GPU memory: its progress thread owns the stream and the peers' mappings, and reads the control
// link, which is an inner shared memory transport (control_link.cpp). Private to this folder.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/gpu_ipc/device_transfer.h"
#include "transport/gpu_ipc/whereabouts.h"
#include "transport/inbox_backend.h"
#include "transport/make_transport.h"

namespace kvferry::gpu_ipc {

/// The decoded form of Transport::address().
struct Address {
  std::uint32_t protocol_version = 0;
  std::uint64_t incarnation = 0;
  std::string control;  // the control link's address
  // Exported region that each transfer on the control link names, because it must name one although it has no ranges.
  std::string control_region;
  Whereabouts where;  // empty in addresses of earlier versions
  KVFERRY_FIELDS(protocol_version, incarnation, control, control_region, where);
};

/// A peer's regions, mapped into this process. An opened region stays open, because opening takes milliseconds. The
/// destructor closes all regions. The peer and each transfer that uses a region keep this object alive.
class Mappings {
 public:
  explicit Mappings(Device& device) : device_(device) {}
  ~Mappings() {
    for (const auto& [region, base] : opened_) device_.close_memory(base);
  }
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  /// Maps the region unless it is mapped already, and returns its address in this process. `bytes`: its size according
  /// to the peer's descriptor.
  Result<std::byte*> open(const std::string& handle, std::uint64_t bytes) {
    const std::pair key(handle, bytes);
    if (const auto found = opened_.find(key); found != opened_.end()) return found->second;
    Result<std::byte*> base = device_.open_memory(handle, bytes);
    if (base) opened_.emplace(key, *base);
    return base;
  }

 private:
  Device& device_;
  std::map<std::pair<std::string, std::uint64_t>, std::byte*> opened_;  // key: exported handle and size
};

/// Threads: Backend says which threads may call its methods. The members from `peers_` on belong to the progress
/// thread; those before `peers_` are constant or synchronised.
class GpuIpcBackend final : public InboxBackend {
 public:
  /// Starts the progress thread. The backend owns `stream` and drops it. `control` carries notifications and
  /// reports dead peers.
  GpuIpcBackend(const GpuIpcOptions& options, const Streams& streams, std::unique_ptr<Transport> control);
  ~GpuIpcBackend() override;

  std::string address() const override { return address_; }
  std::string describe() const override;
  Result<std::uint64_t> check_address(const std::string& address) override;
  Result<RegionKey> open_region(RegionId id, const MemoryRegion& memory) override;
  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) override;
  void add_peer(PeerId peer, const std::string& address) override;
  void drop_peer(PeerId peer) override;
  void submit(AcceptedTransfer accepted) override;
  void feed(FedCopies more) override;
  void cancel(PeerId peer, TransferId id) override;
  void set_source_address(const std::string& address) override { control_->set_source_address(address); }
  void stop() override;

 private:
  struct Peer {
    PeerId id;
    PeerId control;  // id of the same peer on the control link
    std::string control_region;
    Whereabouts where;
    std::shared_ptr<Mappings> mappings;
    bool has_hello = false;    // the hello was sent
    bool is_verified = false;  // the hello has succeeded: a live process has the peer's address
    std::string why_lost;      // reason why the peer was lost; empty: it is not lost
  };
  using PeerPtr = std::shared_ptr<Peer>;
  struct Transfer {
    DeviceTransfer device;
    PeerPtr peer;
    std::shared_ptr<Mappings> mappings{};  // null before the first piece and after the notification is sent
    TimeNs unopened_since = 0;  // time at which the peer's memory could not be opened; 0: it was or will be opened
    std::string why_unopened{};
    TransferId notification{};  // id of the control link's transfer that carries the notification; 0: not sent yet
  };
  using TransferPtr = std::unique_ptr<Transfer>;
  /// The purpose of a transfer on the control link. A kWatch ends when the control link to the peer ends.
  struct ControlRequest {
    enum class Kind { kHello, kWatch, kNotification } kind;
    PeerPtr peer;
    TransferId transfer;  // the transfer to which a kNotification belongs
  };

  void run();
  bool turn() override;
  bool is_over() const override;
  void idle(TimeNs busy_at) override;
  bool drain_control();
  /// Advances all transfers. Returns true if one of them made progress.
  bool advance_all();
  bool reap(Transfer& transfer);
  bool advance(Transfer& transfer);
  bool post_piece(Transfer& transfer);
  std::uint64_t next_piece_bytes() const;
  /// Submits the transfer's notification to the control link, even an empty one: the request fails if the link to the
  /// peer has broken, and the transfer then ends with an error. Returns false if the control link has no room for the
  /// notification; the caller must then call notify() again later.
  bool notify(Transfer& transfer);
  /// Returns a push without ranges for the control link. The caller submits it as a hello, a watch or a notification.
  PagedTransfer without_ranges(const Peer& peer) const;
  void send_hello(const PeerPtr& peer);
  void on_control_request(const ControlRequest& request, const Completion& completion);
  void lose(Peer& peer, const std::string& why);
  Transfer* find(TransferId id);
  void complete(TransferId id, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt_ranges = {});

  const GpuIpcOptions options_;
  Device& device_;
  const Streams streams_;
  std::uint64_t control_memory_ = 0;  // memory of control_region_, never accessed
  const std::unique_ptr<Transport> control_;
  const RegionId control_region_;
  const Whereabouts where_{whereabouts_of(device_)};
  const std::string address_;

  std::unordered_map<PeerId, PeerPtr> peers_;
  std::map<TransferId, TransferPtr> transfers_[3];  // pending transfers by priority, the oldest first
  std::vector<TransferId> over_;  // ids of completed transfers, which advance_all() erases from transfers_
  std::unordered_map<TransferId, ControlRequest> control_requests_;
  std::vector<std::shared_ptr<Mappings>> given_up_;  // mappings that a failed device may still access
  std::vector<DeviceCopy> copies_;  // copies of the next launch; a member, so that its memory is reused
  std::uint64_t bytes_in_flight_ = 0;
  bool is_polling_ = false;   // if true, the device or the full control link must be polled
  bool has_backlog_ = false;  // the completion queue has no room for notifications
  bool has_control_requests_to_push_ = false;
};

}  // namespace kvferry::gpu_ipc
