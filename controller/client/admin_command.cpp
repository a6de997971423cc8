#include "controller/api/admin_command.h"

#include "controller/client/ask.h"

namespace kvferry::controller {

Result<AdminResult> run_admin_command(const std::string& endpoint, const AdminCommand& command,
                                      std::int64_t timeout_ms) {
  const wire::AdminRequest request{.verb = command.verb,
                                   .name_space = command.name_space,
                                   .engine_id = command.engine_id,
                                   .other_engine_id = command.other_engine_id,
                                   .owner = command.owner,
                                   .keys = {command.keys},
                                   .ttl_ms = command.ttl_ms,
                                   .number = command.number};
  Result<wire::AdminReply> reply = ask_for<wire::AdminReply>(endpoint, request, timeout_ms);
  if (!reply) return std::move(reply).error();
  if (!reply->is_done) return Error{ErrorCode::kRefused, std::move(reply->text)};
  return AdminResult{std::move(reply->text), reply->number};
}

}  // namespace kvferry::controller
