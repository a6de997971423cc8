#include "controller/api/rule.h"

#include "controller/client/ask.h"

namespace kvferry::controller {

Result<RuleDone> ask_rule(const std::string& endpoint, const Rule& rule, std::int64_t timeout_ms) {
  const wire::RuleRequest request{.verb = rule.verb,
                                  .name_space = rule.name_space,
                                  .engine_id = rule.engine_id,
                                  .other_engine_id = rule.other_engine_id,
                                  .owner = rule.owner,
                                  .keys = {rule.keys},
                                  .ttl_ms = rule.ttl_ms,
                                  .number = rule.number};
  Result<wire::RuleReply> reply = ask_for<wire::RuleReply>(endpoint, request, timeout_ms);
  if (!reply) return std::move(reply).error();
  if (!reply->is_done) return Error{ErrorCode::kRefused, std::move(reply->text)};
  return RuleDone{std::move(reply->text), reply->number};
}

}  // namespace kvferry::controller
