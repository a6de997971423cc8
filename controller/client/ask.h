// One request to a controller and its reply, over a connection of its own. For status and admin commands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "controller/protocol/wire.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Blocks up to `timeout_ms`. Threads: any.
/// Errors: kInvalidArgument: not an endpoint; kUnavailable: no answer in time; kRefused: another protocol version.
Result<wire::FromController> ask(const std::string& endpoint, std::string_view request, std::int64_t timeout_ms);

/// kCorrupt: the reply is of another type.
template <class Reply, class Request>
Result<Reply> ask_for(const std::string& endpoint, const Request& request, std::int64_t timeout_ms) {
  Request in_oldest = request;  // controllers of other releases can read it, too
  in_oldest.header.version = wire::kProtocol.oldest;
  Result<wire::FromController> message = ask(endpoint, encode(in_oldest), timeout_ms);
  if (!message) return std::move(message).error();
  if (auto* reply = std::get_if<Reply>(&*message)) return std::move(*reply);
  return Error{ErrorCode::kCorrupt, fmt::format("controller {} sent a reply of another type", endpoint)};
}

}  // namespace kvferry::controller
