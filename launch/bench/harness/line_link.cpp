#include "launch/bench/harness/line_link.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <utility>

#include "launch/bench/harness/interrupt.h"
#include "transport/base/net/derived_keys.h"

namespace kvferry::bench {
namespace {

constexpr std::size_t kLineBytesMax = 1 << 20;  // a longer line is an error; the longest fields are exported addresses

/// Returns the error of a system call that failed. `what`: what the call did, such as "send to".
Error failed(const char* what, int code) {
  if (code == EINTR) return interrupted();
  if (code == EPIPE || code == ECONNRESET)
    return {ErrorCode::kPeerLost, "the benchmark's other process has closed the connection"};
  return {ErrorCode::kUnavailable,
          fmt::format("can't {} the benchmark's other process: {}", what, std::generic_category().message(code))};
}

}  // namespace

Result<void> LineLink::send(const nlohmann::json& message) {
  const std::string line = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t written = ::write(out_ ? out_.get() : in_.get(), line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR && !is_interrupted()) continue;
    if (written < 0) return failed("send to", errno);
    done += static_cast<std::size_t>(written);
  }
  return {};
}

Result<nlohmann::json> LineLink::receive(TimeNs timeout_ns) {
  const Deadline deadline(timeout_ns);
  while (true) {
    if (const std::size_t end = received_.find('\n'); end != std::string::npos) {
      nlohmann::json message = nlohmann::json::parse(received_.substr(0, end), nullptr, false);
      received_.erase(0, end + 1);
      if (message.is_object()) return message;
      return Error{ErrorCode::kCorrupt, "the benchmark's other process sent a line that is not a JSON object"};
    }
    if (received_.size() > kLineBytesMax)
      return Error{ErrorCode::kCorrupt,
                   fmt::format("the benchmark's other process sent a line of more than {} bytes", kLineBytesMax)};
    if (Result<void> ok = deadline.check("a line of the benchmark's other process"); !ok) return std::move(ok).error();
    pollfd waiting{in_.get(), POLLIN, 0};
    if (::poll(&waiting, 1, 100) <= 0) continue;
    char buffer[16384];
    const ssize_t got = ::read(in_.get(), buffer, sizeof(buffer));
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return failed("receive from", got == 0 ? EPIPE : errno);
    received_.append(buffer, static_cast<std::size_t>(got));
  }
}

nlohmann::json to_json(const Error& error) { return {{"error", error.what}, {"code", static_cast<int>(error.code)}}; }

Result<nlohmann::json> checked(Result<nlohmann::json> message) {
  if (!message || !message->contains("error")) return message;
  const nlohmann::json& what = message->at("error");
  const nlohmann::json code = message->value("code", nlohmann::json());
  const int number = code.is_number_integer() ? code.get<int>() : 0;
  const bool is_known = number > 0 && number <= static_cast<int>(ErrorCode::kInternal);
  return Error{
      is_known ? static_cast<ErrorCode>(number) : ErrorCode::kInternal,
      what.is_string() ? what.get<std::string>() : "the benchmark's other process reported an error without a text"};
}

std::string to_hex(std::string_view bytes) { return hex_of(bytes); }

Result<std::string> from_hex(std::string_view text) {
  std::optional<std::string> bytes = net::bytes_of_hex(text);
  if (!bytes)
    return Error{ErrorCode::kCorrupt, "the benchmark's other process sent an address that is not hexadecimal"};
  return *std::move(bytes);
}

}  // namespace kvferry::bench
