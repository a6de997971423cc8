// The initiator's end of a link: distributes the segments of transfers over its connections (lanes) and completes the
// transfers.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/out_transfer.h"

namespace kvferry::tcp {

class TcpBackend;

/// The initiator's end of one link. Promise: TransferTable::complete() is called exactly once for each submitted
/// transfer, and by then the transfer's memory is no longer touched.
class OutboundLink final : public MessageHandler {
 public:
  OutboundLink(TcpBackend& host, PeerId peer, Address address, std::uint64_t token);

  /// Begins the first connection. The others are opened for the first transfer that is longer than a segment.
  void start();
  void submit(AcceptedTransfer accepted);
  void feed(const FedCopies& more);
  void cancel(TransferId id);
  /// Makes the connections anew if one of them was made with another cluster key than `key_name`. Returns false, and
  /// changes nothing, if that must wait because transfers are under way.
  bool renew_key(const std::string& key_name);
  /// Completes all transfers with `code` and closes the connections; later transfers end with kPeerLost.
  void end(ErrorCode code, const std::string& why);
  /// Pings a silent peer, and treats a connection as broken after silence_ns without a sign of life. Returns whether
  /// the peer owes an answer.
  bool check(TimeNs now);

  void on_connected(Connection& connection) override;
  Result<void> on_head(Connection& connection, const MessageHead& head) override;
  void on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) override;
  Result<void> on_message_end(Connection& connection) override;
  bool next_message(Connection& connection, OutMessage& out) override;
  void on_broken(Connection& connection, const std::string& why) override;

 private:
  struct Request {
    std::uint32_t number = 0;
    OutTransfer* transfer = nullptr;  // null: the transfer ended before its bytes arrived
    Segment segment;
  };
  struct Lane {
    Connection* connection = nullptr;  // the connection; null: not opened yet, or failed
    bool is_open = false;              // whether the peer has sent its welcome
    bool is_tried = false;
    std::uint64_t requested_bytes = 0;
    std::uint32_t num_requests_made = 0;
    std::vector<Request> requests;
    Request current;                                           // the request whose payload is being received
    std::vector<std::pair<std::size_t, bool>> current_copies;  // for each sink: its copy, whether it ends the copy
    TimeNs pinged_at = 0;
  };

  void try_endpoint();
  void begin_lane(std::size_t index, OwnedFd socket);
  void open_more_lanes();
  void distribute();
  void enqueue(OutTransfer& transfer);
  Result<void> on_data(Connection& connection, const MessageHead& head);
  Result<void> on_answer(const MessageHead& head);
  bool has_window(const Lane& lane, Priority priority) const;
  void request(OutTransfer& transfer, const Segment& segment, Lane& lane, OutMessage& out);
  void end_pull(OutTransfer& transfer, Connection& connection);
  void finish_corrupt(OutTransfer& transfer);
  void finish(OutTransfer& transfer, ErrorCode code, std::string what, std::vector<std::uint32_t> corrupt = {});
  void lose(const std::string& why) { end(ErrorCode::kPeerLost, why); }

  TcpBackend& host_;
  const PeerId peer_;
  const Address address_;
  std::uint64_t token_;  // Hello::link of the connections
  std::size_t endpoint_ = 0;
  std::string failures_;  // the endpoints that failed, and why
  std::vector<Lane> lanes_;
  std::unordered_map<TransferId, std::unique_ptr<OutTransfer>> transfers_;
  std::array<std::vector<OutTransfer*>, 3> queues_;  // transfers with something left to send or request, by priority
  bool is_over_ = false;
  std::string why_over_;
};

}  // namespace kvferry::tcp
