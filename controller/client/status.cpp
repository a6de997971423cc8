#include "controller/api/status.h"

#include "controller/client/ask.h"

namespace kvferry::controller {

Result<Status> fetch_status(const std::string& endpoint, std::int64_t timeout_ms) {
  Result<wire::StatusReply> reply = ask_for<wire::StatusReply>(endpoint, wire::StatusRequest{}, timeout_ms);
  if (!reply) return std::move(reply).error();
  return std::move(reply->status);
}

}  // namespace kvferry::controller
