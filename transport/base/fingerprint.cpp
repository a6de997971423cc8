#include "transport/base/fingerprint.h"

#include <fmt/format.h>

#include <charconv>
#include <set>
#include <utility>

#include "transport/base/printable.h"

namespace kvferry {
namespace {

constexpr std::uint32_t kChunkTokensMax = 65536;
constexpr std::size_t kDifferenceBytesMax = 1024;

constexpr std::pair<std::string_view, std::string_view> kMeanings[] = {
    {"config", " (a digest of the configuration that vLLM runs with)"},
    {"dtype", " (the model's data type)"},
    {"rope", " (the rotary embedding)"},
    {"kv_dtype", " (the KV cache's data type)"},
    {"draft", " (a draft model whose KV is in the chunks; with save_draft_kv false it is not)"},
    {"layers", " (layers with attention)"},
    {"unlike_layers", " (the tensor parallel size, which must be equal if layers have KV of unlike shapes)"},
    {"state", " (the states' format and the tensor parallel size, which must be equal if layers have states)"},
    {"kv_heads", " (KV heads)"},
    {"head_dim", " (head size)"},
    {"chunk_tokens", " (the connector's setting)"},
    {"format", " (the chunk format)"},
    {"weights_epoch", " (number of cache resets since the start)"},
};

std::string_view meaning_of(std::string_view name) {
  for (const auto& [known, meaning] : kMeanings) {
    if (known == name) return meaning;
  }
  return "";
}

bool is_name(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; }

/// Returns where the next field's name begins, from `from` on, and where its '=' is; npos if there is no field.
std::pair<std::size_t, std::size_t> next_field(std::string_view text, std::size_t from) {
  while (from < text.size()) {
    std::size_t end = from;
    while (end < text.size() && is_name(text[end])) ++end;
    if (end > from && end < text.size() && text[end] == '=') return {from, end};
    const std::size_t space = text.find(' ', from);
    if (space == std::string_view::npos) break;
    from = space + 1;
  }
  return {std::string_view::npos, std::string_view::npos};
}

}  // namespace

std::map<std::string, std::string> fingerprint_fields(std::string_view fingerprint) {
  std::map<std::string, std::string> fields;
  auto [begin, equals] = next_field(fingerprint, 0);
  while (begin != std::string_view::npos) {
    const auto [next, next_equals] = next_field(fingerprint, equals + 1);
    const std::size_t end = next == std::string_view::npos ? fingerprint.size() : next - 1;
    // If this field's value is empty, the next field's name may follow the '=' without a space.
    const std::size_t size = end > equals ? end - equals - 1 : 0;
    fields[std::string(fingerprint.substr(begin, equals - begin))] = fingerprint.substr(equals + 1, size);
    begin = next;
    equals = next_equals;
  }
  return fields;
}

std::string fingerprint_difference(std::string_view here, std::string_view there) {
  if (here == there) return "";
  const auto ours = fingerprint_fields(here), theirs = fingerprint_fields(there);
  std::set<std::string> names;
  for (const auto& entry : ours) names.insert(entry.first);
  for (const auto& entry : theirs) names.insert(entry.first);
  const auto value_in = [](const auto& fields, const std::string& name) {
    const auto found = fields.find(name);
    return found == fields.end() ? std::string("missing") : "'" + found->second + "'";
  };
  std::string text;
  for (const std::string& name : names) {
    const std::string our_value = value_in(ours, name), their_value = value_in(theirs, name);
    if (our_value == their_value) continue;
    if (text.size() >= kDifferenceBytesMax) break;
    text += fmt::format("{}{}{} is {} here and {} there", text.empty() ? "" : ", ", name, meaning_of(name), our_value,
                        their_value);
  }
  if (text.empty()) text = fmt::format("the fingerprint is '{}' here and '{}' there", here, there);
  return printable(text, kDifferenceBytesMax);
}

std::optional<std::uint32_t> chunk_tokens_of(std::string_view fingerprint) {
  const auto fields = fingerprint_fields(fingerprint);
  const auto found = fields.find("chunk_tokens");
  if (found == fields.end()) return std::nullopt;
  std::uint32_t tokens = 0;
  const char* const end = found->second.data() + found->second.size();
  const auto [rest, error] = std::from_chars(found->second.data(), end, tokens);
  if (error != std::errc() || rest != end || tokens < 1 || tokens > kChunkTokensMax) return std::nullopt;
  return tokens;
}

}  // namespace kvferry
