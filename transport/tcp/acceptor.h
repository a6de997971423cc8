// Newcomers: who does not say at once whom it wants and that it was told the address is sent away.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "transport/tcp/connection.h"
#include "transport/tcp/link_host.h"

namespace kvferry::tcp {

class Acceptor final : public FrameHandler {
 public:
  /// `welcome` gets a connection whose hello was right, and gives it another handler.
  using Welcome = std::function<void(Connection&, const Hello&)>;
  Acceptor(LinkHost& host, std::uint64_t incarnation, std::string secret, Welcome welcome);

  /// The oldest newcomer makes room when there are too many.
  void greet(OwnedFd socket);
  /// Sends away who has said nothing for too long; true: somebody is still to be heard.
  bool check(TimeNs now);

  void on_connected(Connection&) override {}
  Result<void> on_head(Connection& connection, const FrameHead& head) override;
  void on_piece(Connection&, std::size_t, std::span<const std::byte>, bool) override {}
  Result<void> on_frame(Connection&) override { return {}; }
  bool next_frame(Connection&, OutFrame&) override { return false; }
  void on_broken(Connection& connection, const std::string& why) override;

  static constexpr std::size_t kNewcomersMax = 256;

 private:
  struct PendingPeer {
    Connection* connection;
    TimeNs since;
  };
  /// Empty when it may come in.
  std::string refusal(const FrameHead& head, Hello& hello) const;
  /// False: it is not one of the newcomers.
  bool forget(const Connection& connection);

  LinkHost& host_;
  const std::uint64_t incarnation_;
  const std::string secret_;
  const Welcome welcome_;
  std::deque<PendingPeer> newcomers_;  // oldest first
};

}  // namespace kvferry::tcp
