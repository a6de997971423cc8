#include "controller/api/admin_command.h"

#include "controller/client/ask.h"

namespace kvferry::controller {

Result<AdminResult> run_admin_command(const std::string& endpoint, const AdminCommand& rule, std::int64_t timeout_ms) {
  const wire::AdminRequest request{.verb = rule.verb,
                                  .name_space = rule.name_space,
                                  .engine_id = rule.engine_id,
                                  .other_engine_id = rule.other_engine_id,
                                  .owner = rule.owner,
                                  .keys = {rule.keys},
                                  .ttl_ms = rule.ttl_ms,
                                  .number = rule.number};
  Result<wire::AdminReply> reply = ask_for<wire::AdminReply>(endpoint, request, timeout_ms);
  if (!reply) return std::move(reply).error();
  if (!reply->is_done) return Error{ErrorCode::kRefused, std::move(reply->text)};
  return AdminResult{std::move(reply->text), reply->number};
}

}  // namespace kvferry::controller
