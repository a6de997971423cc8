// The target's end of a link, whose connections (lanes) the initiator has opened. Writes pushed bytes into registered
// memory, sends pulled bytes, and answers pushes and notifications.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/range_verifier.h"
#include "transport/tcp/connection.h"

namespace kvferry::tcp {

class TcpBackend;

class InboundLink final : public MessageHandler {
 public:
  /// `over` is called once, when all connections have been closed, either by close() or after one of them has broken.
  InboundLink(TcpBackend& host, std::string from, std::function<void()> over);

  /// Adds a connection. Returns false if the link has kLanesMax connections already. `member`: name of the member that
  /// has made the connection, see AskingMember.
  bool add(Connection& connection, std::optional<std::string> member);
  /// Closes the link if a connection is silent for too long in the middle of a message. Returns whether the link is
  /// open and a message is incomplete.
  bool check(TimeNs now);
  void close();

  Result<void> on_head(Connection& connection, const MessageHead& head) override;
  void on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) override;
  Result<void> on_message_end(Connection& connection) override;
  bool next_message(Connection& connection, OutMessage& out) override;
  void on_broken(Connection& connection, const std::string& why) override;

  static constexpr std::size_t kLanesMax = 64;
  // Limits on the pushes that are begun and not ended, and on the bytes of their notifications. If a peer exceeds one
  // of these limits, the link is closed.
  static constexpr std::size_t kPushesMax = 65'536;
  static constexpr std::size_t kPendingTextBytesMax = 64 << 20;

 private:
  struct Push {
    std::uint32_t num_segments_begun = 0;  // number of segments whose header has arrived
    std::uint32_t num_segments_in = 0;     // number of segments whose payload has arrived; the push ends when all have
    std::uint32_t num_segments = 0;        // number of all segments of the push; known when is_final
    // Flags of the push's last message (Flags in messages.h); false until that message has arrived.
    bool is_final = false;
    bool is_aborted = false;
    bool is_unsound = false;
    ErrorCode code = ErrorCode::kOk;
    std::string notification;
    std::vector<std::uint32_t> corrupt;
    std::unordered_map<std::size_t, RangeDigest> digests;  // hash of the range that a lane receives; key: lane
  };
  struct Pull {
    MessageHeader header;
    std::vector<Entry> entries;
  };
  struct Lane {
    Connection* connection = nullptr;
    std::optional<std::string> member;      // name of the member that has made the connection
    std::array<std::deque<Pull>, 3> pulls;  // queued pulls by priority
    std::size_t num_pulls = 0;
    MessageHeader current;        // header of the incoming message
    std::vector<Entry> expected;  // entries of the incoming message, if it has checksums
    std::vector<std::uint64_t> checksums;
  };

  Result<void> begin_push(Connection& connection, const MessageHead& head);
  Result<void> queue_pull(Lane& lane, const MessageHead& head);
  void cancel_pull(Lane& lane, std::uint64_t transfer);
  void refuse_pull(Connection& connection, const MessageHeader& pull, const std::string& why);
  Result<void> end_push(Connection& connection, std::uint64_t id);
  void notify(Connection& connection, std::uint64_t id, std::string notification);
  void answer(Connection& connection, std::uint64_t id, ErrorCode code, std::string what,
              std::vector<std::uint32_t> corrupt);

  TcpBackend& host_;
  const std::string from_;
  const std::function<void()> over_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unordered_map<std::uint64_t, Push> pushes_;
  std::size_t pending_text_bytes_ = 0;
  bool is_closed_ = false;
};

}  // namespace kvferry::tcp
