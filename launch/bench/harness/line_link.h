// JSON objects, one a line, over a socket or a pair of pipes: how driver, listener and workers talk.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "transport/base/clock.h"
#include "transport/base/result.h"

namespace kvferry::bench {

/// Owns its descriptors. One thread.
class LineLink {
 public:
  LineLink(int in_fd, int out_fd) : in_fd_(in_fd), out_fd_(out_fd) {}  // the same one twice: a socket
  LineLink(LineLink&& other) noexcept;
  LineLink& operator=(LineLink&&) = delete;
  ~LineLink();

  /// kPeerLost: nobody reads any more.
  Result<void> send(const nlohmann::json& message);
  /// kTimeout, kCancelled (the user's interrupt), kPeerLost (the other side has closed), kCorrupt (no JSON object, or a
  /// line without an end).
  Result<nlohmann::json> receive(TimeNs timeout_ns);

  int in_fd() const { return in_fd_; }
  bool has_line() const { return heard_.find('\n') != std::string::npos; }  // receive() would not wait

 private:
  int in_fd_;
  int out_fd_;
  std::string heard_;
};

/// An error as a message, and back: {"error": what, "code": number}.
nlohmann::json to_json(const Error& error);
/// The message itself, or the error that it tells of.
Result<nlohmann::json> checked(Result<nlohmann::json> message);

std::string to_hex(std::string_view bytes);
/// kCorrupt: an odd number of characters, or others than 0-9a-f.
Result<std::string> from_hex(std::string_view text);

}  // namespace kvferry::bench
