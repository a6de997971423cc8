// The target's end of a link: puts what is pushed into lent memory, sends what is pulled, tells each outcome.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/link_host.h"
#include "transport/tcp/range_checker.h"

namespace kvferry::tcp {

class InboundLink final : public FrameHandler {
 public:
  /// `over` is called once, when a connection broke and all the others were closed.
  InboundLink(LinkHost& host, std::string from, std::function<void()> over);

  /// False: it has kLanesMax already.
  bool add(Connection& connection);
  /// Ends connections that are silent in the middle of something; true: something is.
  bool check(TimeNs now);
  void close();

  void on_connected(Connection&) override {}
  Result<void> on_head(Connection& connection, const FrameHead& head) override;
  void on_piece(Connection& connection, std::size_t part, std::span<const std::byte> bytes, bool ends) override;
  Result<void> on_frame(Connection& connection) override;
  bool next_frame(Connection& connection, OutFrame& out) override;
  void on_broken(Connection& connection, const std::string& why) override;

  static constexpr std::size_t kLanesMax = 64;
  static constexpr std::size_t kPushesMax = 65'536;           // begun and not over
  static constexpr std::size_t kHeldTextBytesMax = 64 << 20;  // their notifications

 private:
  struct Push {
    std::uint32_t num_segments_in = 0;
    std::uint32_t num_segments = 0;  // known with the final one
    bool is_final = false;
    bool is_aborted = false;
    bool is_unsound = false;
    ErrorCode code = ErrorCode::kOk;
    std::string notification;
    std::vector<std::uint32_t> corrupt;
    std::unordered_map<std::size_t, RangeChecker> checkers;  // by lane
  };
  struct Pull {
    FrameHeader header;
    std::vector<Entry> entries;
  };
  struct Lane {
    Connection* connection = nullptr;
    std::array<std::deque<Pull>, 3> pulls;  // by priority
    std::size_t num_pulls = 0;
    FrameHeader current;          // the frame that comes in
    std::vector<Entry> expected;  // of it, when it is checked, and their checksums
    std::vector<std::uint64_t> checksums;
  };

  Result<void> begin_push(Connection& connection, const FrameHead& head);
  Result<void> queue_pull(Lane& lane, const FrameHead& head);
  void cancel_pull(Lane& lane, std::uint64_t transfer);
  void refuse_pull(Connection& connection, const FrameHeader& pull, const std::string& why);
  Result<void> end_push(Connection& connection, std::uint64_t id);
  void answer(Connection& connection, std::uint64_t id, ErrorCode code, std::string what,
              std::vector<std::uint32_t> corrupt);

  LinkHost& host_;
  const std::string from_;
  const std::function<void()> over_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::unordered_map<std::uint64_t, Push> pushes_;
  std::size_t held_text_bytes_ = 0;
  bool is_closed_ = false;
};

}  // namespace kvferry::tcp
