// POST /pair: which prefill and which decode node a prompt should go to.
#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "controller/http/http_api.h"
#include "transport/base/fingerprint.h"

namespace kvferry::controller {
namespace {

using nlohmann::json;

constexpr std::size_t kKeysMax = 65'536;
constexpr std::size_t kNodesMax = 4096;
constexpr std::size_t kEpochsMax = 4;  // limit on weights epochs for which the chunk keys of a request are computed

/// A parsed request. The chunk keys of `tokens` can be computed only once the namespace's fingerprint (of the model and
/// its KV, see fingerprint.h) is known.
struct PairRequest {
  PairQuery query;
  std::string lora_name, lora_path, cache_salt;
  std::vector<std::int32_t> tokens;
  std::vector<ChunkKey> keys;  // keys of the prompt's full chunks, given instead of tokens
  bool has_keys = false;
};

std::optional<ChunkKey> key_of_hex(const std::string& text) {
  ChunkKey key;
  if (text.size() != 2 * key.bytes.size()) return std::nullopt;
  for (std::size_t i = 0; i < key.bytes.size(); ++i) {
    const char* const begin = text.data() + 2 * i;
    const auto [end, error] = std::from_chars(begin, begin + 2, key.bytes[i], 16);
    if (error != std::errc() || end != begin + 2) return std::nullopt;
  }
  return key;
}

void parse_keys(const json& value, PairRequest& asked) {
  const std::string allowed = fmt::format("an array of at most {} strings of 32 hexadecimal digits", kKeysMax);
  if (!value.is_array() || value.size() > kKeysMax) bad_field("keys", &value, allowed);
  for (const json& text : value) {
    const auto key = text.is_string() ? key_of_hex(text.get_ref<const std::string&>()) : std::nullopt;
    if (!key) bad_field(fmt::format("keys[{}]", asked.keys.size()), &text, "32 hexadecimal digits");
    asked.keys.push_back(*key);
  }
  asked.has_keys = true;
}

void parse_nodes(const HttpRequest& request, PairQuery& query) {
  if (const json* exclude = request.find({"exclude"}); exclude != nullptr) {
    if (!exclude->is_array() || exclude->size() > kNodesMax)
      bad_field("exclude", exclude, fmt::format("an array of at most {} engine ids", kNodesMax));
    for (const json& id : *exclude) {
      if (!id.is_string()) bad_field("exclude", exclude, "an array of engine ids, each a string");
      query.exclude.insert(id.get<std::string>());
    }
  }
  if (const json* loads = request.find({"loads"}); loads != nullptr) {
    const std::string allowed = "an object that maps at most 4096 engine ids to numbers of requests from 0 to 1000000";
    if (!loads->is_object() || loads->size() > kNodesMax) bad_field("loads", loads, allowed);
    for (const auto& [id, load] : loads->items()) {
      if (!load.is_number_unsigned() || load.get<std::uint64_t>() > 1'000'000) bad_field("loads", loads, allowed);
      query.loads[id] = load.get<std::uint64_t>();
    }
  }
}

PairRequest parse_pair_request(const HttpRequest& request) {
  PairRequest asked;
  asked.query.name_space = request.text({"namespace"}, "default");
  asked.lora_name = request.text({"lora_name"}, "");
  asked.lora_path = request.text({"lora_path"}, "");
  asked.cache_salt = request.text({"cache_salt"}, "");
  parse_nodes(request, asked.query);
  if (const json* keys = request.find({"keys"}); keys != nullptr) {
    parse_keys(*keys, asked);
    return asked;
  }
  const std::vector<std::uint32_t> tokens = request.tokens();
  asked.tokens.assign(tokens.begin(), tokens.end());
  asked.query.num_tokens = asked.tokens.size();
  return asked;
}

/// Returns how many of the prompt's tokens a holder has: the tokens in the holder's full chunks. If the holder has all
/// full chunks of the prompt, and the request has the prompt's tokens, the longest tail that matches the rest of the
/// prompt counts too.
std::uint64_t cached_tokens(const HolderView& holder, const PairRequest& asked, const PromptKeys& prompt,
                            std::uint32_t chunk_tokens) {
  std::uint64_t num_cached = std::uint64_t{holder.num_full_chunks} * chunk_tokens;
  if (asked.has_keys || holder.num_full_chunks < prompt.keys.size()) return num_cached;
  const std::span<const std::int32_t> rest = std::span(asked.tokens).subspan(num_cached);
  std::uint64_t longest = 0;
  for (const ChunkEntry& tail : holder.tails) {
    if (tail.num_tokens <= longest || tail.num_tokens > rest.size()) continue;
    if (chunk_key(prompt.rest_parent, rest.first(tail.num_tokens)) == tail.key) longest = tail.num_tokens;
  }
  return num_cached + longest;
}

json node_json(const PairNode& node) {
  return {{"engine_id", node.engine_id},
          {"serves", node.serves},
          {"endpoint", node.endpoint},
          {"cached_tokens", node.num_cached},
          {"load", node.load}};
}

/// Returns the weights epochs that most nodes of the namespace report, at most kEpochsMax.
std::vector<std::string> weights_epochs(const Directory& directory, const std::string& name_space) {
  std::map<std::string, std::size_t> num_nodes;
  for (const NodeId id : directory.nodes_of(name_space)) {
    const std::shared_ptr<NodeReport>& report = directory.node(id)->report;
    ++num_nodes[report == nullptr ? "" : report->weights_epoch];
  }
  std::vector<std::pair<std::string, std::size_t>> epochs(num_nodes.begin(), num_nodes.end());
  std::ranges::stable_sort(epochs, std::greater<>(), &std::pair<std::string, std::size_t>::second);
  std::vector<std::string> most;
  for (std::size_t i = 0; i < std::min(epochs.size(), kEpochsMax); ++i) most.push_back(std::move(epochs[i].first));
  return most;
}

/// Chooses the nodes for POST /pair. `prompts`: the prompt's keys in each weights epoch. Threads: the owner thread.
Result<json> choose(HttpApi& api, const PairRequest& asked, const std::vector<PromptKeys>& prompts,
                    std::uint32_t chunk_tokens) {
  Directory& directory = api.backend.sessions.directory();
  std::unordered_map<std::string, std::uint64_t> cached;  // [engine id] number of the prompt's tokens that the node has
  for (const PromptKeys& prompt : prompts) {
    if (prompt.keys.empty() && prompt.tail_groups.empty()) continue;
    std::vector<HolderView> found;
    LookupView view;
    view.keys = prompt.keys;
    view.tail_groups = prompt.tail_groups;
    directory.find_holders(asked.query.name_space, view, found);
    for (const HolderView& holder : found) {
      std::uint64_t& num_cached = cached[holder.info->engine_id.value];
      num_cached = std::max(num_cached, cached_tokens(holder, asked, prompt, chunk_tokens));
    }
  }
  std::vector<PairNode> nodes;
  for (const NodeId id : directory.nodes_of(asked.query.name_space)) {
    const Directory::Node& node = *directory.node(id);
    const NodeInfo& info = node.info;
    const auto held = cached.find(info.engine_id.value);
    nodes.push_back({.engine_id = info.engine_id.value,
                     .role = info.role,
                     .serves = info.serves,
                     .endpoint = info.endpoint,
                     .load = node.load,
                     .load_reported_at = node.load_reported_at,
                     .num_cached = held == cached.end() ? 0 : held->second,
                     .is_leaving = node.is_leaving});
  }
  const Pair pair = KVFERRY_TRY(api.pairing.choose(asked.query, nodes));
  return json{{"prefill", node_json(nodes[pair.prefill])},
              {"decode", node_json(nodes[pair.decode])},
              {"skip_prefill", pair.skip_prefill}};
}

}  // namespace

json handle_pair(HttpApi& api, const HttpRequest& request) {
  PairRequest asked = parse_pair_request(request);
  const auto [fingerprint, epochs] = api.ask_owner([&](TimeNs) {
    const Directory& directory = api.backend.sessions.directory();
    return std::pair(directory.fingerprint_of(asked.query.name_space),
                     weights_epochs(directory, asked.query.name_space));
  });
  const std::uint32_t chunk_tokens = chunk_tokens_of(fingerprint).value_or(0);
  std::vector<PromptKeys> prompts;
  if (asked.has_keys) {
    asked.query.num_tokens = asked.keys.size() * chunk_tokens;
    prompts.push_back({.keys = asked.keys, .tail_groups = {}, .rest_parent = {}});
  } else if (chunk_tokens > 0) {
    for (const std::string& epoch : epochs) {
      const std::string extras = request_extras(asked.lora_name, asked.lora_path, epoch, asked.cache_salt);
      prompts.push_back(keys_of_prompt(root_key(fingerprint, extras), chunk_tokens, asked.tokens));
    }
  }
  return checked(api.ask_owner([&](TimeNs) { return choose(api, asked, prompts, chunk_tokens); }));
}

}  // namespace kvferry::controller
