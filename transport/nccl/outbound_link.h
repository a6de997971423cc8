// The initiator's end of a session: cuts transfers into pieces, requests them and completes the transfers. Private to
// this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/nccl/link.h"
#include "transport/nccl/out_transfer.h"

namespace kvferry::nccl {

/// The initiator's end of one session. Promise: TransferTable::complete() is called exactly once for each transfer, and
/// by then this link no longer touches the transfer's memory.
class OutboundLink final : public Link {
 public:
  OutboundLink(Context& context, PeerId id, std::uint64_t session, ControlPeerPtr peer)
      : Link(context, session, std::move(peer)), id_(id) {}

  void submit(AcceptedTransfer transfer);
  void feed(const FedCopies& more);
  void cancel(TransferId id);
  /// Ends the session, and all its transfers with `code`.
  void end(ErrorCode code, const std::string& why);
  bool is_empty() const { return transfers_.empty(); }

  Result<void> on_message(const Message& message) override;
  bool needs_polling() const override { return Link::needs_polling() || !hashing_.empty() || has_stuck(); }

 private:
  enum class Wants : std::uint8_t { kPull, kPush, kHash, kNotify };  // the first three have the values of Purpose
  /// A request that was sent to the peer or, for a push, will be sent when the channel has started the piece.
  struct Request {
    Wants wants{};
    OutTransfer* transfer = nullptr;  // nullptr: the transfer has ended
    std::vector<Part> parts;
    bool is_touching = false;  // the piece is in a channel, which may touch local memory
    bool is_answered = false;
  };
  struct Hashing {
    OutTransfer* transfer = nullptr;
    std::vector<Part> copies;
    std::unique_ptr<Device::Checksums> checksums;
  };

  void on_report(bool is_pull, Channel::Report& report) override;
  void advance_work() override;
  void on_lost(const std::string& why) override;
  bool is_owed() const override { return !requests_.empty() || !transfers_.empty(); }

  Result<void> on_data(std::uint64_t token);
  Result<void> on_answer(const Answer& answer);
  Result<void> ensure_channel(bool is_pull);
  bool has_room(Priority priority) const;
  void post_piece(OutTransfer& transfer);
  void send_request(std::uint64_t token, const Request& request);
  void post_hash(OutTransfer& transfer);
  void post_notification(OutTransfer& transfer);
  void poll_hashes();
  void end_transfer(OutTransfer& transfer, ErrorCode code, const std::string& why);
  bool has_stuck() const;
  bool is_over(const OutTransfer& transfer) const;
  void complete(OutTransfer& transfer);

  const PeerId id_;
  std::vector<std::unique_ptr<OutTransfer>> transfers_;  // most urgent first, then oldest
  std::uint64_t num_tokens_ = 0;
  std::uint32_t num_pieces_ = 0;  // number of pulls and pushes in requests_
  std::unordered_map<std::uint64_t, Request> requests_;
  std::vector<Hashing> hashing_;
  bool has_sent_hello_ = false;
  bool is_ended_ = false;  // whether end() was called
  ErrorCode lost_code_ = ErrorCode::kPeerLost;
  std::string lost_why_;
};

}  // namespace kvferry::nccl
