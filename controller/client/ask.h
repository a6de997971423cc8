// One question to a controller and its answer, for whoever asks seldom. Private to controller/*.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "controller/protocol/wire.h"
#include "transport/base/result.h"

namespace kvferry::controller {

/// Blocks up to `timeout_ms`. Threads: any.
/// Errors: kInvalidArgument: not an endpoint; kUnavailable: no answer in time; kRefused: another protocol version.
Result<wire::Message> ask(const std::string& endpoint, std::string_view question, std::int64_t timeout_ms);

/// kCorrupt: it answers with something else.
template <class Reply, class Question>
Result<Reply> ask_for(const std::string& endpoint, const Question& question, std::int64_t timeout_ms) {
  Question in_oldest = question;  // which controllers of other releases read, too
  in_oldest.header.version = wire::kProtocol.oldest;
  Result<wire::Message> message = ask(endpoint, encode(in_oldest), timeout_ms);
  if (!message) return std::move(message).error();
  if (auto* reply = std::get_if<Reply>(&*message)) return std::move(*reply);
  return Error{ErrorCode::kCorrupt, fmt::format("controller {} answered with another kind of message", endpoint)};
}

}  // namespace kvferry::controller
