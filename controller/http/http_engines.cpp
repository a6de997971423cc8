// POST /register and /unregister: the engines whose KV events the controller follows. POST /query, /query_by_hash and
// /score: how much of a prompt each engine has.
#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "controller/http/http_api.h"

namespace kvferry::controller {
namespace {

using nlohmann::json;

constexpr std::size_t kCandidatesMax = 4096;
constexpr std::array<double, kNumTiers> kWeights = {1.0, 0.8, 0.5, 0.3};

PromptQuery parse_prompt(const HttpRequest& request, bool by_hash) {
  PromptQuery query;
  query.model = request.text({"model", "model_name", "modelname"}, {});
  query.tenant = request.text({"tenant_id"}, "default");
  query.salt = request.text({"cache_salt", "additional_salt", "additionalsalt"}, "");
  query.lora_name = request.text({"lora_name"}, "");
  query.lora_id = request.number({"lora_id"}, 0, ~std::uint64_t{0} >> 1, false);
  if (std::string instance = request.name({"instance_id"}, ""); !instance.empty())
    query.instance_id = std::move(instance);
  if (const auto block_size = request.number({"block_size"}, 1, kBlockSizeMax, false))
    query.block_size = static_cast<std::uint32_t>(*block_size);
  if (by_hash)
    query.hashes = request.hashes();
  else
    query.tokens = request.tokens();
  return query;
}

std::vector<RankMatch> match(const HttpApi& api, const PromptQuery& query) {
  return checked(api.ask_owner([&](TimeNs) { return api.backend.engines.match(query); }));
}

json instances_json(const std::vector<RankMatch>& rows) {
  json instances = json::object();
  for (const RankMatch& row : rows) {
    json& instance = instances[row.instance_id];
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

json query(const HttpApi& api, const HttpRequest& request, bool by_hash) {
  const PromptQuery prompt = parse_prompt(request, by_hash);
  const std::vector<RankMatch> rows = match(api, prompt);
  json answer = json::object();
  for (const RankMatch& row : rows)
    answer["scores"][row.instance_id][std::to_string(row.rank)] = row.up_to_tier[kNumTiers - 1];
  answer[prompt.tenant] = instances_json(rows);
  return answer;
}

std::optional<std::set<std::string>> parse_candidates(const HttpRequest& request) {
  const json* value = request.find({"candidates"});
  if (value == nullptr) return std::nullopt;
  if (!value->is_array() || value->size() > kCandidatesMax)
    bad_field("candidates", value, fmt::format("an array of at most {} instance ids", kCandidatesMax));
  std::set<std::string> wanted;
  for (const json& candidate : *value) {
    if (!candidate.is_string() && !candidate.is_number_integer())
      bad_field("candidates", value, "an array of instance ids, each a string or an integer");
    wanted.insert(candidate.is_string() ? candidate.get<std::string>() : candidate.dump());
  }
  return wanted;
}

std::array<double, kNumTiers> parse_weights(const HttpRequest& request) {
  std::array<double, kNumTiers> weights = kWeights;
  const json* value = request.find({"weights"});
  if (value == nullptr) return weights;
  const std::string allowed = "the fields gpu, cpu, disk and remote, each a number from 0 to 1";
  if (!value->is_object()) bad_field("weights", value, "an object with " + allowed);
  for (const auto& [name, weight] : value->items()) {
    const auto* tier = std::find(std::begin(kTierNames), std::end(kTierNames), name);
    if (tier == std::end(kTierNames) || !weight.is_number() || weight.get<double>() < 0 || weight.get<double>() > 1)
      bad_field("weights." + name.substr(0, 64), &weight, allowed);
    weights[static_cast<std::size_t>(tier - std::begin(kTierNames))] = weight.get<double>();
  }
  return weights;
}

json score_json(const RankMatch& row, const PromptQuery& prompt, const std::array<double, kNumTiers>& weights) {
  json entry{{"instance_id", row.instance_id},
             {"dp_rank", row.rank},
             {"longest_matched", row.up_to_tier[kNumTiers - 1]},
             {"confirmed", row.confirmed},
             {"known", true}};
  double worth = 0;
  std::uint32_t before = 0;
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    entry[kTierNames[tier]] = row.up_to_tier[tier] - before;
    worth += weights[tier] * (row.up_to_tier[tier] - before);
    before = row.up_to_tier[tier];
  }
  const double num_tokens = prompt.hashes.empty() ? static_cast<double>(prompt.tokens.size())
                                                  : static_cast<double>(prompt.hashes.size()) * row.block_size;
  entry["score"] = num_tokens > 0 ? worth / num_tokens : 0.0;
  return entry;
}

}  // namespace

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
        {ErrorCode::kNotFound,
         fmt::format(
             "no engine with instance_id '{}' (model: {}, tenant: {}, rank: {}) is registered; GET /workers lists the "
             "registered engines",
             instance, model.empty() ? "any" : model, tenant.empty() ? "any" : tenant,
             rank ? std::to_string(*rank) : "any")});
  return {{"status", "unregistered successfully"}, {"removed_instances", removed}};
}

json handle_query(HttpApi& api, const HttpRequest& request) { return query(api, request, false); }
json handle_query_by_hash(HttpApi& api, const HttpRequest& request) { return query(api, request, true); }

json handle_score(HttpApi& api, const HttpRequest& request) {
  const PromptQuery prompt = parse_prompt(request, request.find({"token_ids"}) == nullptr);
  const std::optional<std::set<std::string>> candidates = parse_candidates(request);
  const std::array<double, kNumTiers> weights = parse_weights(request);
  std::vector<json> scores;
  std::set<std::string> unknown = candidates.value_or(std::set<std::string>{});
  for (const RankMatch& row : match(api, prompt)) {
    if (candidates && !candidates->contains(row.instance_id)) continue;
    unknown.erase(row.instance_id);
    scores.push_back(score_json(row, prompt, weights));
  }
  for (const std::string& name : unknown) {
    scores.push_back(score_json({.instance_id = name, .confirmed = false}, prompt, weights));
    scores.back()["known"] = false;
  }
  std::stable_sort(scores.begin(), scores.end(),
                   [](const json& a, const json& b) { return a["score"].get<double>() > b["score"].get<double>(); });
  json answer{{"scores", scores}};
  answer["best"] = scores.empty() || scores.front()["score"].get<double>() == 0 ? json() : scores.front();
  return answer;
}

}  // namespace kvferry::controller
