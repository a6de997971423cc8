// The NCCL backend: its progress thread owns all sessions, channels and the control link of one transport. Private to
// this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/inbox_backend.h"
#include "transport/nccl/inbound_link.h"
#include "transport/nccl/outbound_link.h"

namespace kvferry::nccl {

/// Threads: Backend says which threads may call its methods. The private members belong to the progress thread, except
/// `pinned_` and those that never change.
class NcclBackend final : public InboxBackend {
 public:
  /// Starts the progress thread.
  NcclBackend(const NcclOptions& options, std::unique_ptr<Communicators> communicators,
              std::unique_ptr<ControlPlane> control);
  ~NcclBackend() override;

  std::string address() const override { return address_; }
  std::string describe() const override;
  Result<std::uint64_t> check_address(const std::string& address) override;
  Result<RegionKey> open_region(RegionId id, const MemoryRegion& memory) override;
  Result<void> close_region(RegionId id, bool is_stopped) override;
  void add_peer(PeerId peer, const std::string& address) override;
  void drop_peer(PeerId peer) override;
  void submit(AcceptedTransfer transfer) override;
  void feed(FedCopies more) override;
  void cancel(PeerId peer, TransferId id) override;
  void set_source_address(const std::string& address) override { context_.source_address = address; }
  void stop() override;

 private:
  struct Session {
    Link* link = nullptr;
    std::string from;  // control address of the peer; messages from other addresses are ignored
    // The member that has opened the session; messages of others are ignored. No value: this side has opened it, or
    // there is no list of members.
    std::optional<std::string> member = {};
  };

  bool turn() override;
  bool is_over() const override;
  void idle(TimeNs busy_at) override;
  void advance_links();
  void dispatch(const ControlPlane::Incoming& incoming);
  void welcome(const Message& message, const ControlPlane::Incoming& incoming);
  bool needs_polling() const;

  const NcclOptions options_;
  const std::unique_ptr<Communicators> communicators_;
  const std::unique_ptr<ControlPlane> control_;
  StagingPool staging_;
  Context context_;
  const std::string address_;
  std::unordered_map<RegionId, std::span<std::byte>> pinned_;  // pinned host memory; any thread uses it, one at a time

  std::unordered_map<PeerId, std::unique_ptr<OutboundLink>> outbound_;
  std::vector<std::unique_ptr<OutboundLink>> dropped_;  // links to disconnected peers, which may still touch memory
  std::vector<std::unique_ptr<InboundLink>> inbound_;
  std::unordered_map<std::uint64_t, Session> sessions_;
  TimeNs stop_until_ = 0;
};

}  // namespace kvferry::nccl
