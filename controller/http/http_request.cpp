#include "controller/http/http_request.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kTextBytesMax = 1024;
constexpr std::size_t kTokensMax = std::size_t{1} << 20;
constexpr std::size_t kHashesMax = std::size_t{1} << 16;
constexpr std::size_t kShownMax = 40;

}  // namespace

void bad_field(std::string_view name, const nlohmann::json* value, std::string_view allowed) {
  std::string shown = "missing";
  if (value != nullptr) {
    shown = value->is_structured() && value->size() > 8
                ? fmt::format("{} of {}", value->type_name(), value->size())
                : value->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (shown.size() > kShownMax) shown = shown.substr(0, kShownMax) + "...";
  }
  throw HttpFailure({ErrorCode::kInvalidArgument, fmt::format("{} is {}; allowed: {}", name, shown, allowed)});
}

HttpRequest::HttpRequest(const std::string& body) {
  // Valid requests have at most three levels. Deep documents are refused, because dump(), which writes a value into an
  // error, would recurse deeply.
  bool is_deep = false;
  body_ = nlohmann::json::parse(
      body,
      [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
        is_deep = is_deep || depth > 8;
        return !is_deep;
      },
      false);
  if (is_deep || !body_.is_object())
    throw HttpFailure(
        {ErrorCode::kInvalidArgument,
         fmt::format(
             "the body of {} bytes is not a JSON object of at most 8 levels; allowed: {{\"field\": value, ...}}",
             body.size())});
}

const nlohmann::json* HttpRequest::find(std::initializer_list<const char*> names, const char** name) const {
  for (const char* candidate : names) {
    const auto it = body_.find(candidate);
    if (it == body_.end() || it->is_null()) continue;
    if (name != nullptr) *name = candidate;
    return &*it;
  }
  return nullptr;
}

std::string HttpRequest::text(std::initializer_list<const char*> names, std::optional<std::string> fallback) const {
  const char* name = *names.begin();
  const nlohmann::json* value = find(names, &name);
  if (value == nullptr && fallback) return *std::move(fallback);
  if (value == nullptr || !value->is_string() || value->get_ref<const std::string&>().size() > kTextBytesMax ||
      (!fallback && value->get_ref<const std::string&>().empty()))
    bad_field(name, value, fmt::format("a string of {} to {} bytes", fallback ? 0 : 1, kTextBytesMax));
  return value->get<std::string>();
}

std::string HttpRequest::name(std::initializer_list<const char*> names, std::optional<std::string> fallback) const {
  const nlohmann::json* value = find(names);
  if (value != nullptr && value->is_number_integer()) return value->dump();
  return text(names, std::move(fallback));
}

std::optional<std::uint64_t> HttpRequest::number(std::initializer_list<const char*> names, std::uint64_t least,
                                                 std::uint64_t most, bool is_needed) const {
  const char* name = *names.begin();
  const nlohmann::json* value = find(names, &name);
  if (value == nullptr && !is_needed) return std::nullopt;
  if (value == nullptr || !value->is_number_unsigned() || value->get<std::uint64_t>() < least ||
      value->get<std::uint64_t>() > most)
    bad_field(name, value, fmt::format("an integer from {} to {}", least, most));
  return value->get<std::uint64_t>();
}

std::vector<std::uint32_t> HttpRequest::tokens() const {
  const nlohmann::json* value = find({"token_ids"});
  const std::string allowed = fmt::format("an array of at most {} integers from 0 to 4294967295", kTokensMax);
  if (value == nullptr || !value->is_array() || value->size() > kTokensMax) bad_field("token_ids", value, allowed);
  std::vector<std::uint32_t> tokens;
  tokens.reserve(value->size());
  for (const nlohmann::json& token : *value) {
    if (!token.is_number_unsigned() || token.get<std::uint64_t>() > 0xffffffff)
      bad_field(fmt::format("token_ids[{}]", tokens.size()), &token, "an integer from 0 to 4294967295");
    tokens.push_back(token.get<std::uint32_t>());
  }
  return tokens;
}

std::vector<std::uint64_t> HttpRequest::hashes() const {
  const char* name = "seq_hashes";
  const nlohmann::json* value = find({"seq_hashes", "block_hashes", "block_hash"}, &name);
  const std::string allowed = fmt::format("an array of 1 to {} 64-bit integers", kHashesMax);
  if (value == nullptr || !value->is_array() || value->empty() || value->size() > kHashesMax)
    bad_field(name, value, allowed);
  std::vector<std::uint64_t> hashes;
  hashes.reserve(value->size());
  for (const nlohmann::json& hash : *value) {
    if (!hash.is_number_integer()) bad_field(fmt::format("{}[{}]", name, hashes.size()), &hash, "a 64-bit integer");
    hashes.push_back(hash.is_number_unsigned() ? hash.get<std::uint64_t>()
                                               : static_cast<std::uint64_t>(hash.get<std::int64_t>()));
  }
  return hashes;
}

}  // namespace kvferry::controller
