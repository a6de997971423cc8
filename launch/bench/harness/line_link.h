// Exchanges JSON objects, one per line, over a socket or pipes, between the processes of a benchmark.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "transport/base/clock.h"
#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::bench {

/// One end of a connection that carries lines of JSON. Not thread-safe.
class LineLink {
 public:
  /// If `out` is empty, send() uses `in`, and works only if `in` is a socket.
  explicit LineLink(OwnedFd in, OwnedFd out = {}) : in_(std::move(in)), out_(std::move(out)) {}

  /// Sends an object as one line. Errors: kPeerLost if the other process has closed the connection, kCancelled (the
  /// user's interrupt), kUnavailable with the system's reason.
  Result<void> send(const nlohmann::json& message);
  /// Waits for a line and returns its object. Errors: kTimeout, kCancelled (the user's interrupt), kPeerLost (the
  /// connection is closed), kCorrupt (the line is no JSON object, or too long), kUnavailable with the system's reason.
  Result<nlohmann::json> receive(TimeNs timeout_ns);

  int in_fd() const { return in_.get(); }
  bool has_line() const { return received_.find('\n') != std::string::npos; }  // if true, receive() returns at once

 private:
  OwnedFd in_, out_;
  std::string received_;
};

/// Returns an error as a message: {"error": what, "code": number}.
nlohmann::json to_json(const Error& error);
/// Returns the message, or the error that the message carries.
Result<nlohmann::json> checked(Result<nlohmann::json> message);

std::string to_hex(std::string_view bytes);
/// Decodes hexadecimal digits. Errors: kCorrupt if `text` has an odd number of characters, or characters other than 0-9
/// and a-f.
Result<std::string> from_hex(std::string_view text);

}  // namespace kvferry::bench
