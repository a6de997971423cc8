#include "controller/directory/pairing.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::controller {
namespace {

constexpr std::size_t kChosenMax = 65'536;

bool may_prefill(const PairNode& node) { return node.role == "kv_producer" || node.role == "kv_both"; }
bool may_decode(const PairNode& node) { return node.role == "kv_consumer" || node.role == "kv_both"; }

Error unavailable(std::string_view kind, std::string_view roles, const PairQuery& query,
                  const std::vector<PairNode>& nodes, bool (*may)(const PairNode&)) {
  std::size_t num_registered = 0, num_leaving = 0, num_excluded = 0, num_without_url = 0;
  for (const PairNode& node : nodes) {
    if (!may(node)) continue;
    ++num_registered;
    if (node.is_leaving)
      ++num_leaving;
    else if (query.exclude.contains(node.engine_id))
      ++num_excluded;
    else if (node.serves.empty())
      ++num_without_url;
  }
  std::string text = fmt::format("no {} node ({}) of namespace '{}' accepts requests: {} registered", kind, roles,
                                 query.name_space, num_registered);
  if (num_leaving > 0) text += fmt::format(", {} draining", num_leaving);
  if (num_excluded > 0) text += fmt::format(", {} excluded by the caller", num_excluded);
  if (num_without_url > 0)
    text += fmt::format(", {} without the setting 'serves', the URL for routers", num_without_url);
  return Error{ErrorCode::kUnavailable, text};
}

}  // namespace

Result<Pair> Pairing::choose(const PairQuery& query, std::vector<PairNode>& nodes) {
  const auto is_open = [&](const PairNode& node) {
    return !node.is_leaving && !node.serves.empty() && !query.exclude.contains(node.engine_id);
  };
  const auto left = [&](const PairNode& node) {
    return query.num_tokens - std::min(query.num_tokens, node.num_cached);
  };
  const auto can_skip = [&](const PairNode& node) { return node.num_cached > 0 && left(node) <= kSkipTokensMax; };
  using Costs = std::vector<std::pair<std::uint64_t, std::size_t>>;
  Costs prefills, decodes;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (is_open(nodes[i])) nodes[i].load = load_of(query, nodes[i]);
    if (is_open(nodes[i]) && may_prefill(nodes[i]))
      prefills.emplace_back(left(nodes[i]) + kPrefillTokensPerRequest * nodes[i].load, i);
  }
  if (prefills.empty()) return unavailable("prefill", "kv_producer or kv_both", query, nodes, may_prefill);
  const std::uint64_t prefill_cost = std::ranges::min(prefills).first;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (!is_open(nodes[i]) || !may_decode(nodes[i])) continue;
    const std::uint64_t work =
        can_skip(nodes[i]) ? left(nodes[i]) : prefill_cost + left(nodes[i]) / kTokensMovedPerComputed;
    decodes.emplace_back(work + kDecodeTokensPerRequest * nodes[i].load, i);
  }
  if (decodes.empty()) return unavailable("decode", "kv_consumer or kv_both", query, nodes, may_decode);

  Pair pair{.decode = best(decodes)};
  // The decode node is also the prefill node only if no other node can prefill.
  if (prefills.size() > 1) std::erase_if(prefills, [&](const auto& cost) { return cost.second == pair.decode; });
  pair.prefill = best(prefills);
  pair.skip_prefill = can_skip(nodes[pair.decode]) || pair.prefill == pair.decode;
  ++turn_;
  if (!pair.skip_prefill) count(query, nodes[pair.prefill]);
  count(query, nodes[pair.decode]);
  return pair;
}

std::uint64_t Pairing::load_of(const PairQuery& query, const PairNode& node) {
  std::uint64_t load = node.load;
  const auto chosen = chosen_.find({query.name_space, node.engine_id});
  if (chosen != chosen_.end() && chosen->second.load_reported_at == node.load_reported_at)
    load += chosen->second.num_requests;
  const auto known = query.loads.find(node.engine_id);
  return known == query.loads.end() ? load : std::max(load, known->second);
}

/// Returns the cheapest node. `costs` has (cost, node) pairs; nodes of equal cost are chosen in rotation.
std::size_t Pairing::best(const std::vector<std::pair<std::uint64_t, std::size_t>>& costs) {
  const std::uint64_t least = std::ranges::min(costs).first;
  std::vector<std::size_t> equals;
  for (const auto& [cost, node] : costs)
    if (cost == least) equals.push_back(node);
  return equals[turn_ % equals.size()];
}

void Pairing::count(const PairQuery& query, const PairNode& node) {
  if (chosen_.size() >= kChosenMax) chosen_.clear();  // nearly all entries belong to nodes that were removed
  Chosen& chosen = chosen_[{query.name_space, node.engine_id}];
  if (chosen.load_reported_at != node.load_reported_at) chosen = {node.load_reported_at, 0};
  ++chosen.num_requests;
}

PromptKeys keys_of_prompt(const ChunkKey& root, std::uint32_t chunk_tokens, std::span<const std::int32_t> tokens) {
  PromptKeys prompt{.keys = {}, .tail_groups = {}, .rest_parent = root};
  for (;;) {
    if (tokens.size() >= kTailGroupTokens) prompt.tail_groups.push_back(tail_group_key(prompt.rest_parent, tokens));
    if (tokens.size() < chunk_tokens) return prompt;
    prompt.rest_parent = chunk_key(prompt.rest_parent, tokens.first(chunk_tokens));
    prompt.keys.push_back(prompt.rest_parent);
    tokens = tokens.subspan(chunk_tokens);
  }
}

std::string request_extras(const std::string& lora_name, const std::string& lora_path, const std::string& weights_epoch,
                           const std::string& cache_salt) {
  std::string extras;
  const auto add = [&extras](std::string_view part) { extras += fmt::format("{}{}", extras.empty() ? "" : ";", part); };
  if (!lora_name.empty()) add(fmt::format("lora={}@{}", lora_name, lora_path));
  if (!weights_epoch.empty()) add("epoch=" + weights_epoch);
  if (!cache_salt.empty()) add("salt=" + cache_salt);
  return extras;
}

}  // namespace kvferry::controller
