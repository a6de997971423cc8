// JSON objects, one a line, over a socket or a pair of pipes, between driver, listener and workers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "transport/base/clock.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::bench {

/// One thread.
class LineLink {
 public:
  /// Without `out`, `in` is a socket.
  explicit LineLink(OwnedFd in, OwnedFd out = {}) : in_(std::move(in)), out_(std::move(out)) {}

  /// kPeerLost: the other side has closed.
  Result<void> send(const nlohmann::json& message);
  /// kTimeout, kCancelled (the user's interrupt), kPeerLost (the other side has closed), kCorrupt (no JSON object, or a
  /// line without an end).
  Result<nlohmann::json> receive(TimeNs timeout_ns);

  int in_fd() const { return in_.get(); }
  bool has_line() const { return received_.find('\n') != std::string::npos; }  // receive() returns at once

 private:
  OwnedFd in_, out_;
  std::string received_;
};

/// An error as a message: {"error": what, "code": number}.
nlohmann::json to_json(const Error& error);
/// The message itself, or the error that it carries.
Result<nlohmann::json> checked(Result<nlohmann::json> message);

std::string to_hex(std::string_view bytes);
/// kCorrupt: an odd number of characters, or characters other than 0-9 and a-f.
Result<std::string> from_hex(std::string_view text);

}  // namespace kvferry::bench
