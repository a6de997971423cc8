// POST /register and /unregister: the engines whose KV events the controller follows.
#include <optional>

#include "controller/http/http_api.h"

namespace kvferry::controller {

using nlohmann::json;

json handle_register(HttpApi& api, const HttpRequest& request) {
  EngineInfo info;
  info.instance_id = request.name({"instance_id"}, {});
  info.endpoint = request.text({"endpoint"}, {});
  info.model = request.text({"modelname", "model_name", "model"}, {});
  info.replay_endpoint = request.text({"replay_endpoint"}, "");
  info.kind = request.text({"type"}, "vLLM");
  info.tenant = request.text({"tenant_id"}, "default");
  info.salt = request.text({"additionalsalt", "additional_salt"}, "");
  info.lora_name = request.text({"lora_name"}, "");
  info.block_size = static_cast<std::uint32_t>(*request.number({"block_size"}, 1, kBlockSizeMax, true));
  if (const auto rank = request.number({"dp_rank"}, 0, kRankMax, false))
    info.dp_rank = static_cast<std::uint32_t>(*rank);
  checked(api.ask_owner([&](TimeNs now) { return api.backend.events.add(info, now); }));
  return {{"status", "registered successfully"}, {"instance_id", info.instance_id}};
}

json handle_unregister(HttpApi& api, const HttpRequest& request) {
  const std::string instance = request.name({"instance_id"}, {});
  const std::string model = request.text({"modelname", "model_name", "model"}, "");
  const std::string tenant = request.text({"tenant_id"}, "");
  std::optional<std::uint32_t> rank;
  if (const auto number = request.number({"dp_rank"}, 0, kRankMax, false)) rank = static_cast<std::uint32_t>(*number);
  const auto removed = api.ask_owner([&](TimeNs) {
    std::vector<std::string> names;
    for (const EngineNumber engine : api.backend.engines.find(instance, model, tenant, rank)) {
      const EngineInfo* info = api.backend.engines.info(engine);
      names.push_back(fmt::format("{}|{}|{}", info->instance_id, info->tenant, info->dp_rank.value_or(0)));
      api.backend.events.remove(engine);
    }
    return names;
  });
  if (removed.empty())
    throw HttpFailure(
        {ErrorCode::kNotFound, fmt::format("instance_id is '{}'; no such engine is registered", instance)});
  return {{"status", "unregistered successfully"}, {"removed_instances", removed}};
}

}  // namespace kvferry::controller
