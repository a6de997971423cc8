// The end of a session at the target, whose memory is accessed: serves the initiator's requests, piece by piece.
// Private to this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/memory_access.h"
#include "transport/nccl/link.h"

namespace kvferry::nccl {

class InboundLink final : public Link {
 public:
  /// `member`: the member that has opened the session (Notification::member).
  InboundLink(Context& context, std::uint64_t session, ControlPeerPtr peer, std::optional<std::string> member)
      : Link(context, session, std::move(peer)), member_(std::move(member)) {}

  Result<void> on_message(const Message& message) override;
  bool needs_polling() const override { return Link::needs_polling() || num_hashing_ > 0; }

 private:
  struct Served {
    Purpose purpose{};
    MemoryAccess access;
    Error refusal{ErrorCode::kOk, ""};  // answer to a push, sent after its bytes have arrived or been dropped
    std::unique_ptr<Device::Checksums> checksums;
  };

  void on_report(bool is_pull, Channel::Report& report) override;
  void advance_work() override;
  void on_lost(const std::string& why) override;
  bool is_owed() const override { return !served_.empty() || Link::needs_polling(); }

  Result<void> on_open(const Open& open);
  Result<void> on_ask(const Ask& ask);
  void on_notify(Notify notify);
  void hash(std::uint64_t token, Served served, const std::vector<std::span<std::byte>>& parts);
  void answer(std::uint64_t token, const Error& outcome, std::vector<std::uint64_t> checksums = {});

  const std::optional<std::string> member_;
  std::unordered_map<std::uint64_t, Served> served_;
  std::uint32_t num_hashing_ = 0;  // number of entries of served_ whose checksums are being computed
};

}  // namespace kvferry::nccl
