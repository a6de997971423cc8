// POST /query, /query_by_hash and /score: how much of a prompt each engine has.
#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "controller/http/http_handlers.h"

namespace kvferry::controller {
namespace {

using nlohmann::json;

constexpr std::size_t kCandidatesMax = 4096;
constexpr std::array<double, kNumTiers> kWeights = {1.0, 0.8, 0.5, 0.3};

Result<PromptQuery> parse_prompt(const HttpRequest& request, bool by_hash) {
  PromptQuery query;
  std::optional<std::uint64_t> block_size;
  std::string instance;
  FirstError first_error;
  first_error.set(query.model, request.text({"model", "model_name", "modelname"}, {}));
  first_error.set(query.tenant, request.text({"tenant_id"}, "default"));
  first_error.set(query.salt, request.text({"cache_salt", "additional_salt", "additionalsalt"}, ""));
  first_error.set(query.lora_name, request.text({"lora_name"}, ""));
  first_error.set(query.lora_id, request.number({"lora_id"}, 0, ~std::uint64_t{0} >> 1, false));
  first_error.set(instance, request.name({"instance_id"}, ""));
  first_error.set(block_size, request.number({"block_size"}, 1, kBlockSizeMax, false));
  if (by_hash)
    first_error.set(query.hashes, request.hashes());
  else
    first_error.set(query.tokens, request.tokens());
  if (first_error.error) return *first_error.error;
  if (block_size) query.block_size = static_cast<std::uint32_t>(*block_size);
  if (!instance.empty()) query.instance_id = instance;
  return query;
}

/// A RankMatch without pointers into the directory.
struct Row {
  std::string instance;
  std::uint32_t rank = 0, block_size = 0;
  std::array<std::uint32_t, kNumTiers> in_tier{}, up_to_tier{};
  bool confirmed = true;
};

Result<std::vector<Row>> find_rows(const HttpBackend& backend, const OnOwner& on_owner, const PromptQuery& query) {
  Result<std::vector<Row>> rows = std::vector<Row>{};
  Result<void> done = on_owner([&](TimeNs) {
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
  if (!done) return std::move(done).error();
  return rows;
}

json instances_json(const std::vector<Row>& rows) {
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

Result<json> query(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request, bool by_hash) {
  const Result<PromptQuery> prompt = parse_prompt(request, by_hash);
  if (!prompt) return prompt.error();
  const Result<std::vector<Row>> rows = find_rows(backend, on_owner, *prompt);
  if (!rows) return rows.error();
  json answer = json::object();
  for (const Row& row : *rows) answer["scores"][row.instance][std::to_string(row.rank)] = row.up_to_tier[kNumTiers - 1];
  answer[prompt->tenant] = instances_json(*rows);
  return answer;
}

Result<std::optional<std::set<std::string>>> parse_candidates(const HttpRequest& request) {
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

Result<std::array<double, kNumTiers>> parse_weights(const HttpRequest& request) {
  std::array<double, kNumTiers> weights = kWeights;
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

json score_json(const Row& row, const PromptQuery& prompt, const std::array<double, kNumTiers>& weights) {
  json entry{{"instance_id", row.instance},
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

Result<json> handle_query(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  return query(backend, on_owner, request, false);
}
Result<json> handle_query_by_hash(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  return query(backend, on_owner, request, true);
}

Result<json> handle_score(const HttpBackend& backend, const OnOwner& on_owner, const HttpRequest& request) {
  const Result<PromptQuery> prompt = parse_prompt(request, request.find({"token_ids"}) == nullptr);
  if (!prompt) return prompt.error();
  const Result<std::optional<std::set<std::string>>> candidates = parse_candidates(request);
  if (!candidates) return candidates.error();
  const Result<std::array<double, kNumTiers>> weights = parse_weights(request);
  if (!weights) return weights.error();
  const Result<std::vector<Row>> rows = find_rows(backend, on_owner, *prompt);
  if (!rows) return rows.error();

  std::vector<json> scores;
  std::set<std::string> unknown = candidates->value_or(std::set<std::string>{});
  for (const Row& row : *rows) {
    if (*candidates && !(*candidates)->contains(row.instance)) continue;
    unknown.erase(row.instance);
    scores.push_back(score_json(row, *prompt, *weights));
  }
  for (const std::string& name : unknown) {
    scores.push_back(score_json({.instance = name, .confirmed = false}, *prompt, *weights));
    scores.back()["known"] = false;
  }
  std::stable_sort(scores.begin(), scores.end(),
                   [](const json& a, const json& b) { return a["score"].get<double>() > b["score"].get<double>(); });
  json answer{{"scores", scores}};
  answer["best"] = scores.empty() || scores.front()["score"].get<double>() == 0 ? json() : scores.front();
  return answer;
}

}  // namespace kvferry::controller
