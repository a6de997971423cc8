#include "controller/http/http_api.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "controller/http/http_pair.h"
#include "controller/http/http_request.h"
#include "controller/http/http_views.h"
#include "controller/http/status_json.h"

namespace kvferry::controller {
namespace {

using nlohmann::json;

constexpr const char* kPaths =
    "GET /, /healthz, /metrics, /nodes, /status, /workers; POST /pair, /query, /query_by_hash, /register, /score, "
    "/unregister";
constexpr std::uint64_t kBlockSizeMax = 65536;
constexpr std::uint64_t kRankMax = 65535;
constexpr std::size_t kCandidatesMax = 4096;
constexpr const char* kTierNames[kNumTiers] = {"gpu", "cpu", "disk", "remote"};
constexpr double kWeights[kNumTiers] = {1.0, 0.8, 0.5, 0.3};

Result<EngineInfo> engine_of(const HttpRequest& request) {
  EngineInfo info;
  const auto take = [](auto& field, auto result) -> Result<void> {
    if (!result) return std::move(result).error();
    field = *std::move(result);
    return {};
  };
  std::optional<std::uint64_t> block_size, rank;
  for (const Result<void>& taken :
       {take(info.instance_id, request.name({"instance_id"}, {})), take(info.endpoint, request.text({"endpoint"}, {})),
        take(info.model, request.text({"modelname", "model_name", "model"}, {})),
        take(info.replay_endpoint, request.text({"replay_endpoint"}, "")),
        take(info.kind, request.text({"type"}, "vLLM")), take(info.tenant, request.text({"tenant_id"}, "default")),
        take(info.salt, request.text({"additionalsalt", "additional_salt"}, "")),
        take(info.lora_name, request.text({"lora_name"}, "")),
        take(block_size, request.number({"block_size"}, 1, kBlockSizeMax, true)),
        take(rank, request.number({"dp_rank"}, 0, kRankMax, false))}) {
    if (!taken) return taken.error();
  }
  info.block_size = static_cast<std::uint32_t>(*block_size);
  if (rank) info.dp_rank = static_cast<std::uint32_t>(*rank);
  return info;
}

Result<PromptQuery> prompt_of(const HttpRequest& request, bool by_hash) {
  PromptQuery query;
  const auto take = [](auto& field, auto result) -> Result<void> {
    if (!result) return std::move(result).error();
    field = *std::move(result);
    return {};
  };
  std::optional<std::uint64_t> block_size;
  std::string instance;
  for (const Result<void>& taken :
       {take(query.model, request.text({"model", "model_name", "modelname"}, {})),
        take(query.tenant, request.text({"tenant_id"}, "default")),
        take(query.salt, request.text({"cache_salt", "additional_salt", "additionalsalt"}, "")),
        take(query.lora_name, request.text({"lora_name"}, "")),
        take(query.lora_id, request.number({"lora_id"}, 0, ~std::uint64_t{0} >> 1, false)),
        take(instance, request.name({"instance_id"}, "")),
        take(block_size, request.number({"block_size"}, 1, kBlockSizeMax, false)),
        by_hash ? take(query.hashes, request.hashes()) : take(query.tokens, request.tokens())}) {
    if (!taken) return taken.error();
  }
  if (block_size) query.block_size = static_cast<std::uint32_t>(*block_size);
  if (!instance.empty()) query.instance_id = instance;
  return query;
}

/// A rank's match without pointers into the directory.
struct Row {
  std::string instance;
  std::uint32_t rank = 0, block_size = 0;
  std::array<std::uint32_t, kNumTiers> in_tier{}, up_to_tier{};
  bool confirmed = true;
};

/// Threads: the caller's; asks the owner.
Result<std::optional<std::vector<Row>>> rows_of(const HttpBackend& backend, const OnOwner& on_owner,
                                                const PromptQuery& query) {
  Result<std::vector<Row>> rows = std::vector<Row>{};
  const bool is_done = on_owner([&](TimeNs) {
    Result<std::vector<RankMatch>> found = backend.engines->match(query);
    if (!found) {
      rows = std::move(found).error();
      return;
    }
    for (const RankMatch& match : *found) {
      Row row{.instance = match.engine->instance_id, .rank = match.rank, .block_size = match.engine->block_size};
      std::copy_n(match.in_tier, kNumTiers, row.in_tier.begin());
      std::copy_n(match.up_to_tier, kNumTiers, row.up_to_tier.begin());
      row.confirmed = match.confirmed;
      rows->push_back(std::move(row));
    }
  });
  if (!is_done) return std::optional<std::vector<Row>>();
  if (!rows) return std::move(rows).error();
  return std::optional(*std::move(rows));
}

json instances_of(const std::vector<Row>& rows) {
  json instances = json::object();
  for (const Row& row : rows) {
    json& instance = instances[row.instance];
    if (instance.is_null()) instance = json::object();
    const auto grow = [&](const char* name, std::uint32_t tokens) {
      instance[name] = std::max(instance.value(name, std::uint32_t{0}), tokens);
    };
    const std::string rank = std::to_string(row.rank);
    grow("longest_matched", row.up_to_tier[kNumTiers - 1]);
    constexpr const char* kMedia[kNumTiers] = {"GPU", "CPU", "DISK", "REMOTE"};
    for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
      grow(kMedia[tier], row.in_tier[tier]);
      grow(kTierNames[tier], row.in_tier[tier]);
      instance["rank_matches"][rank][kTierNames[tier]] = row.up_to_tier[tier];
    }
    instance["DP"][rank] = row.up_to_tier[kNumTiers - 1];
    instance["dp"][rank] = row.up_to_tier[kNumTiers - 1];
    instance["confirmed"] = instance.value("confirmed", true) && row.confirmed;
  }
  return instances;
}

HttpAnswer query(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request, bool by_hash) {
  const Result<PromptQuery> prompt = prompt_of(request, by_hash);
  if (!prompt) return http_failed(prompt.error());
  const Result<std::optional<std::vector<Row>>> rows = rows_of(backend, on_owner, *prompt);
  if (!rows) return http_failed(rows.error());
  if (!*rows) return http_busy();
  json answer = json::object();
  for (const Row& row : **rows)
    answer["scores"][row.instance][std::to_string(row.rank)] = row.up_to_tier[kNumTiers - 1];
  answer[prompt->tenant] = instances_of(**rows);
  return http_ok(answer);
}

Result<std::optional<std::set<std::string>>> candidates_of(const HttpRequest& request) {
  const json* value = request.find({"candidates"});
  if (value == nullptr) return std::optional<std::set<std::string>>();
  if (!value->is_array() || value->size() > kCandidatesMax)
    return bad_field("candidates", value, fmt::format("an array of at most {} instance ids", kCandidatesMax));
  std::set<std::string> wanted;
  for (const json& candidate : *value) {
    if (!candidate.is_string() && !candidate.is_number_integer())
      return bad_field("candidates", value, "an array of instance ids, each a text or an integer");
    wanted.insert(candidate.is_string() ? candidate.get<std::string>() : candidate.dump());
  }
  return std::optional(std::move(wanted));
}

Result<std::array<double, kNumTiers>> weights_of(const HttpRequest& request) {
  std::array<double, kNumTiers> weights{};
  std::copy_n(kWeights, kNumTiers, weights.begin());
  const json* value = request.find({"weights"});
  if (value == nullptr) return weights;
  const std::string allowed = "an object of gpu, cpu, disk and remote, each a number of 0 to 1";
  if (!value->is_object()) return bad_field("weights", value, allowed);
  for (const auto& [name, weight] : value->items()) {
    const auto* tier = std::find(std::begin(kTierNames), std::end(kTierNames), name);
    if (tier == std::end(kTierNames) || !weight.is_number() || weight.get<double>() < 0 || weight.get<double>() > 1)
      return bad_field("weights." + name, &weight, allowed);
    weights[static_cast<std::size_t>(tier - std::begin(kTierNames))] = weight.get<double>();
  }
  return weights;
}

HttpAnswer score(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  const Result<PromptQuery> prompt = prompt_of(request, request.find({"token_ids"}) == nullptr);
  if (!prompt) return http_failed(prompt.error());
  const Result<std::optional<std::set<std::string>>> candidates = candidates_of(request);
  if (!candidates) return http_failed(candidates.error());
  const Result<std::array<double, kNumTiers>> weights = weights_of(request);
  if (!weights) return http_failed(weights.error());
  const Result<std::optional<std::vector<Row>>> rows = rows_of(backend, on_owner, *prompt);
  if (!rows) return http_failed(rows.error());
  if (!*rows) return http_busy();

  std::vector<json> scores;
  std::set<std::string> seen;
  for (const Row& row : **rows) {
    if (*candidates && !(*candidates)->contains(row.instance)) continue;
    seen.insert(row.instance);
    const double num_tokens = prompt->hashes.empty() ? static_cast<double>(prompt->tokens.size())
                                                     : static_cast<double>(prompt->hashes.size()) * row.block_size;
    json entry{{"instance_id", row.instance},
               {"dp_rank", row.rank},
               {"longest_matched", row.up_to_tier[kNumTiers - 1]},
               {"confirmed", row.confirmed},
               {"known", true}};
    double worth = 0;
    std::uint32_t before = 0;
    for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
      entry[kTierNames[tier]] = row.up_to_tier[tier] - before;
      worth += (*weights)[tier] * (row.up_to_tier[tier] - before);
      before = row.up_to_tier[tier];
    }
    entry["score"] = num_tokens > 0 ? worth / num_tokens : 0.0;
    scores.push_back(std::move(entry));
  }
  if (*candidates) {
    for (const std::string& name : **candidates) {
      if (seen.contains(name)) continue;
      scores.push_back({{"instance_id", name},
                        {"dp_rank", 0},
                        {"longest_matched", 0},
                        {"confirmed", false},
                        {"known", false},
                        {"gpu", 0},
                        {"cpu", 0},
                        {"disk", 0},
                        {"remote", 0},
                        {"score", 0.0}});
    }
  }
  std::stable_sort(scores.begin(), scores.end(),
                   [](const json& a, const json& b) { return a["score"].get<double>() > b["score"].get<double>(); });
  json answer{{"scores", scores}};
  answer["best"] = scores.empty() || scores.front()["score"].get<double>() == 0 ? json() : scores.front();
  return http_ok(answer);
}

HttpAnswer add(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  const Result<EngineInfo> info = engine_of(request);
  if (!info) return http_failed(info.error());
  std::optional<Error> error;
  const bool is_done = on_owner([&](TimeNs now) {
    Result<EngineDirectory::Added> added = backend.events->add(*info, now);
    if (!added) error = std::move(added).error();
  });
  if (!is_done) return http_busy();
  if (error) return http_failed(*error);
  return http_ok({{"status", "registered successfully"}, {"instance_id", info->instance_id}});
}

HttpAnswer remove(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  const Result<std::string> instance = request.name({"instance_id"}, {});
  if (!instance) return http_failed(instance.error());
  const Result<std::string> model = request.text({"modelname", "model_name", "model"}, "");
  if (!model) return http_failed(model.error());
  const Result<std::string> tenant = request.text({"tenant_id"}, "");
  if (!tenant) return http_failed(tenant.error());
  const Result<std::optional<std::uint64_t>> rank = request.number({"dp_rank"}, 0, kRankMax, false);
  if (!rank) return http_failed(rank.error());
  std::vector<std::string> removed;
  const bool is_done = on_owner([&](TimeNs) {
    const std::optional<std::uint32_t> wanted =
        *rank ? std::optional(static_cast<std::uint32_t>(**rank)) : std::nullopt;
    for (const EngineNumber engine : backend.engines->find(*instance, *model, *tenant, wanted)) {
      const EngineInfo* info = backend.engines->info(engine);
      removed.push_back(fmt::format("{}|{}|{}", info->instance_id, info->tenant, info->dp_rank.value_or(0)));
      backend.events->remove(engine);
    }
  });
  if (!is_done) return http_busy();
  if (removed.empty())
    return http_error(404, fmt::format("instance_id is '{}'; no such engine is registered", *instance));
  return http_ok({{"status", "unregistered successfully"}, {"removed_instances", removed}});
}

HttpAnswer view(const HttpBackend& backend, const OnOwner& on_owner, const std::string& path) {
  ControllerView all;
  const bool is_done = on_owner([&](TimeNs now) {
    all.status = backend.status(now);
    all.endpoint = backend.endpoint;
    all.engines = backend.engines->engines(now);
    all.namespaces = backend.engines->namespaces();
    all.messages_malformed = backend.events->num_malformed();
  });
  if (!is_done) return http_busy();
  if (path == "/metrics") return {200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(all)};
  if (path == "/nodes") return http_ok(nodes_json(all.status));
  if (path == "/workers") return http_ok(workers_json(all));
  return http_ok(view_json(all));
}

}  // namespace

HttpAnswer HttpApi::answer(const std::string& method, const std::string& path, const std::string& body) const {
  try {
    const bool is_get = method == "GET" || method == "HEAD";
    if (is_get && path == "/") return {200, "text/html; charset=utf-8", std::string(status_page())};
    if (is_get && path == "/healthz") {
      // Healthy is a controller whose owner thread answers.
      return on_owner_([](TimeNs) {}) ? HttpAnswer{200, "text/plain; charset=utf-8", "ok\n"} : http_busy();
    }
    if (is_get && (path == "/metrics" || path == "/nodes" || path == "/status" || path == "/workers"))
      return view(backend_, on_owner_, path);
    using Handler = std::function<HttpAnswer(const HttpRequest&)>;
    const std::map<std::string_view, Handler> handlers = {
        {"/pair", [&](const HttpRequest& request) { return pair_answer(backend_, on_owner_, request); }},
        {"/query", [&](const HttpRequest& request) { return query(backend_, on_owner_, request, false); }},
        {"/query_by_hash", [&](const HttpRequest& request) { return query(backend_, on_owner_, request, true); }},
        {"/score", [&](const HttpRequest& request) { return score(backend_, on_owner_, request); }},
        {"/register", [&](const HttpRequest& request) { return add(backend_, on_owner_, request); }},
        {"/unregister", [&](const HttpRequest& request) { return remove(backend_, on_owner_, request); }}};
    const auto handler = handlers.find(path);
    if (method == "POST" && handler != handlers.end()) {
      const Result<HttpRequest> request = HttpRequest::parse(body);
      return request ? handler->second(*request) : http_failed(request.error());
    }
    return http_error(404, fmt::format("{} {} is not there; there are {}", method, path.substr(0, 100), kPaths));
  } catch (const std::exception& failure) {
    return http_error(500, failure.what());
  }
}

}  // namespace kvferry::controller
