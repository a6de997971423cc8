// The initiator's end of a link: deals the segments of its transfers to its connections and completes them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/link_host.h"
#include "transport/tcp/out_transfer.h"

namespace kvferry::tcp {

/// Promise: each submitted transfer reaches transfer_table.complete() once, and by then its memory is no longer touched.
class OutboundLink final : public FrameHandler {
 public:
  OutboundLink(LinkHost& host, PeerId peer, Address address, std::uint64_t token);

  /// Begins the first connection; the others follow when a transfer is long enough for them.
  void start();
  void submit(AcceptedTransfer accepted);
  /// False: not one of this link's.
  bool feed(TransferId id, FedCopies& more);
  bool cancel(TransferId id);
  /// Completes everything with `code` and closes the connections; what is submitted later ends with kPeerLost.
  void end(ErrorCode code, const std::string& why);
  /// Asks silent peers for a sign of life and gives up the dead; true: something is owed.
  bool check(TimeNs now);

  void on_connected(Connection& connection) override;
  Result<void> on_head(Connection& connection, const FrameHead& head) override;
  void on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) override;
  Result<void> on_frame(Connection& connection) override;
  bool next_frame(Connection& connection, OutFrame& out) override;
  void on_broken(Connection& connection, const std::string& why) override;

 private:
  struct Request {
    std::uint32_t number = 0;
    OutTransfer* transfer = nullptr;  // null: over before its bytes came
    Segment segment;
  };
  struct Lane {
    Connection* connection = nullptr;  // null: not begun, or it came to nothing
    bool is_open = false;              // welcome
    bool is_tried = false;
    std::uint64_t asked_bytes = 0;
    std::uint32_t num_requests_made = 0;
    std::vector<Request> requests;
    Request current;                          // whose payload comes in
    std::vector<std::size_t> current_copies;  // of its parts, when they are checked
    TimeNs pinged_at = 0;
  };

  void try_endpoint();
  void begin_lane(std::size_t index, OwnedFd socket);
  void open_more();
  void deal();
  void queue(OutTransfer& transfer);
  Result<void> on_data(Connection& connection, const FrameHead& head);
  Result<void> on_answer(const FrameHead& head);
  bool has_window(const Lane& lane, Priority priority) const;
  void push_frame(OutTransfer& transfer, const Segment& segment, OutFrame& out);
  void pull_frame(OutTransfer& transfer, const Segment& segment, Lane& lane, OutFrame& out);
  void end_pull(OutTransfer& transfer, Connection& connection);
  void finish_corrupt(OutTransfer& transfer);
  void finish(OutTransfer& transfer, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt = {});
  void lose(const std::string& why) { end(ErrorCode::kPeerLost, why); }

  LinkHost& host_;
  const PeerId peer_;
  const Address address_;
  const std::uint64_t token_;
  std::size_t endpoint_ = 0;
  std::string tried_;  // the endpoints that failed, and why
  std::vector<Lane> lanes_;
  std::unordered_map<TransferId, std::unique_ptr<OutTransfer>> transfers_;
  std::array<std::vector<OutTransfer*>, 3> queues_;  // with something to deal, by priority
  bool is_over_ = false;
  std::string over_why_;
};

}  // namespace kvferry::tcp
