// POST /register and /unregister: the engines whose KV events the controller follows.
#include <optional>

#include "controller/http/http_handlers.h"

namespace kvferry::controller {

using nlohmann::json;

Result<json> handle_register(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  EngineInfo info;
  std::optional<std::uint64_t> block_size, rank;
  FirstError first_error;
  first_error.set(info.instance_id, request.name({"instance_id"}, {}));
  first_error.set(info.endpoint, request.text({"endpoint"}, {}));
  first_error.set(info.model, request.text({"modelname", "model_name", "model"}, {}));
  first_error.set(info.replay_endpoint, request.text({"replay_endpoint"}, ""));
  first_error.set(info.kind, request.text({"type"}, "vLLM"));
  first_error.set(info.tenant, request.text({"tenant_id"}, "default"));
  first_error.set(info.salt, request.text({"additionalsalt", "additional_salt"}, ""));
  first_error.set(info.lora_name, request.text({"lora_name"}, ""));
  first_error.set(block_size, request.number({"block_size"}, 1, kBlockSizeMax, true));
  first_error.set(rank, request.number({"dp_rank"}, 0, kRankMax, false));
  if (first_error.error) return *first_error.error;
  info.block_size = static_cast<std::uint32_t>(*block_size);
  if (rank) info.dp_rank = static_cast<std::uint32_t>(*rank);

  Result<EngineDirectory::Added> added = EngineDirectory::Added{};
  if (Result<void> done = on_owner([&](TimeNs now) { added = backend.events->add(info, now); }); !done)
    return std::move(done).error();
  if (!added) return std::move(added).error();
  return json{{"status", "registered successfully"}, {"instance_id", info.instance_id}};
}

Result<json> handle_unregister(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  std::string instance, model, tenant;
  std::optional<std::uint64_t> rank;
  FirstError first_error;
  first_error.set(instance, request.name({"instance_id"}, {}));
  first_error.set(model, request.text({"modelname", "model_name", "model"}, ""));
  first_error.set(tenant, request.text({"tenant_id"}, ""));
  first_error.set(rank, request.number({"dp_rank"}, 0, kRankMax, false));
  if (first_error.error) return *first_error.error;

  std::vector<std::string> removed;
  Result<void> done = on_owner([&](TimeNs) {
    const auto wanted = rank ? std::optional(static_cast<std::uint32_t>(*rank)) : std::nullopt;
    for (const EngineNumber engine : backend.engines->find(instance, model, tenant, wanted)) {
      const EngineInfo* info = backend.engines->info(engine);
      removed.push_back(fmt::format("{}|{}|{}", info->instance_id, info->tenant, info->dp_rank.value_or(0)));
      backend.events->remove(engine);
    }
  });
  if (!done) return std::move(done).error();
  if (removed.empty())
    return Error{ErrorCode::kNotFound, fmt::format("instance_id is '{}'; no such engine is registered", instance)};
  return json{{"status", "unregistered successfully"}, {"removed_instances", removed}};
}

}  // namespace kvferry::controller
