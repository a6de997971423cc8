#include "controller/scale/etcd_messages.h"

#include <openssl/evp.h>

#include <charconv>
#include <nlohmann/json.hpp>

namespace kvferry::controller::scale {
namespace {

using nlohmann::json;

std::string to_base64(std::string_view plain) {
  std::string text(4 * ((plain.size() + 2) / 3) + 1, '\0');
  const int size =
      ::EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                        reinterpret_cast<const unsigned char*>(plain.data()), static_cast<int>(plain.size()));
  text.resize(static_cast<std::size_t>(size));
  return text;
}

/// Decodes base64. Throws an exception if `text` is malformed, as nlohmann::json does for malformed JSON.
std::string from_base64(std::string_view text) {
  std::string plain(text.size() / 4 * 3, '\0');
  const int size =
      ::EVP_DecodeBlock(reinterpret_cast<unsigned char*>(plain.data()),
                        reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  if (size < 0) throw std::invalid_argument("a key or value in it is not base64");
  std::size_t num_padding = 0;
  while (num_padding < 2 && num_padding < text.size() && text[text.size() - 1 - num_padding] == '=') ++num_padding;
  plain.resize(static_cast<std::size_t>(size) - num_padding);
  return plain;
}

/// Returns the first key after all keys that begin with `prefix`.
std::string end_of(std::string_view prefix) {
  std::string end(prefix);
  while (!end.empty() && end.back() == '\xff') end.pop_back();
  if (end.empty()) return std::string(1, '\0');  // in etcd, a range with the end "\0" has no upper limit
  end.back() = static_cast<char>(static_cast<unsigned char>(end.back()) + 1);
  return end;
}

/// Returns the number in a field. The gateway writes 64-bit numbers as strings and omits zeros.
std::int64_t number_at(const json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end()) return 0;
  if (it->is_number_integer()) return it->get<std::int64_t>();
  const auto& text = it->get_ref<const std::string&>();
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size())
    throw std::invalid_argument(fmt::format("its field '{}' is not a number", name));
  return number;
}

std::string bytes_at(const json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() ? std::string{} : from_base64(it->get_ref<const std::string&>());
}

EtcdPair pair_of(const json& object) {
  return {bytes_at(object, "key"), bytes_at(object, "value"), number_at(object, "mod_revision"),
          number_at(object, "lease")};
}

json compare(const std::string& key, std::int64_t mod_revision) {
  return json::array({{{"key", to_base64(key)},
                       {"target", "MOD"},
                       {"result", "EQUAL"},
                       {"mod_revision", std::to_string(mod_revision)}}});
}

json read_key(const std::string& key) { return json::array({{{"request_range", {{"key", to_base64(key)}}}}}); }

Error error_of(const json& object) {
  // gRPC's status codes: 3 invalid, 5 not found, 7 denied, 12 unknown call, 16 not logged in.
  const std::int64_t code = number_at(object, "code");
  const std::string what = object.value("message", object.value("error", std::string("no reason was given")));
  const bool final = code == 3 || code == 7 || code == 12;
  return {code == 5    ? ErrorCode::kNotFound
          : code == 16 ? ErrorCode::kCancelled
          : final      ? ErrorCode::kRefused
                       : ErrorCode::kUnavailable,
          fmt::format("etcd answered with an error: {}", what.substr(0, 200))};
}

/// Calls `read` with the parsed body, unless the body is an error.
template <class Read>
auto parse_reply(std::string_view body, const Read& read) -> Result<decltype(read(json{}))> {
  try {
    const json object = json::parse(body);
    if (!object.is_object()) throw std::invalid_argument("it is not a JSON object");
    if (const auto error = object.find("error"); error != object.end())
      return error_of(error->is_object() ? *error : object);
    return read(object);
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("a reply of etcd of {} bytes can't be read: {}", body.size(), failure.what())};
  }
}

struct PostOf {
  HttpPost operator()(const EtcdGrant& grant) const {
    return {"/v3/lease/grant", json{{"TTL", std::to_string(grant.ttl_s)}}.dump()};
  }
  HttpPost operator()(const EtcdKeepAlive& keep) const {
    return {"/v3/lease/keepalive", json{{"ID", std::to_string(keep.lease)}}.dump()};
  }
  HttpPost operator()(const EtcdRevoke& revoke) const {
    return {"/v3/lease/revoke", json{{"ID", std::to_string(revoke.lease)}}.dump()};
  }
  HttpPost operator()(const EtcdPut& put) const {
    const json change = {{"key", to_base64(put.pair.key)},
                         {"value", to_base64(put.pair.value)},
                         {"lease", std::to_string(put.pair.lease)}};
    return {"/v3/kv/txn", json{{"compare", compare(put.pair.key, put.pair.mod_revision)},
                               {"success", json::array({{{"request_put", change}}})},
                               {"failure", read_key(put.pair.key)}}
                              .dump()};
  }
  HttpPost operator()(const EtcdErase& erase) const {
    return {"/v3/kv/txn", json{{"compare", compare(erase.key, erase.mod_revision)},
                               {"success", json::array({{{"request_delete_range", {{"key", to_base64(erase.key)}}}}})},
                               {"failure", read_key(erase.key)}}
                              .dump()};
  }
};

}  // namespace

HttpPost post_of(const EtcdRequest& request) { return std::visit(PostOf{}, request); }

HttpPost range_of(std::string_view prefix, bool count_only) {
  return {
      "/v3/kv/range",
      json{{"key", to_base64(prefix)}, {"range_end", to_base64(end_of(prefix))}, {"count_only", count_only}}.dump()};
}

HttpPost watch_of(std::string_view prefix, std::int64_t from_revision) {
  return {"/v3/watch", json{{"create_request",
                             {{"key", to_base64(prefix)},
                              {"range_end", to_base64(end_of(prefix))},
                              {"start_revision", std::to_string(from_revision)}}}}
                           .dump()};
}

HttpPost login_of(std::string_view user, std::string_view password) {
  return {"/v3/auth/authenticate",
          json{{"name", user}, {"password", password}}.dump(-1, ' ', false, json::error_handler_t::replace)};
}

Result<EtcdReply> reply_of(const EtcdRequest& request, std::string_view body) {
  return parse_reply(body, [&](const json& object) {
    EtcdReply reply;
    // In a streamed reply, each line is an object that has the reply in its field "result".
    const json& result = object.contains("result") ? object.at("result") : object;
    reply.revision = number_at(result.value("header", json::object()), "revision");
    reply.lease = number_at(result, "ID");
    reply.ttl_s = number_at(result, "TTL");
    if (!std::holds_alternative<EtcdPut>(request) && !std::holds_alternative<EtcdErase>(request)) return reply;
    reply.done = result.value("succeeded", false);
    if (reply.done) return reply;
    for (const json& response : result.value("responses", json::array())) {
      const json& range = response.at("response_range");
      if (const auto pairs = range.find("kvs"); pairs != range.end()) reply.found = pair_of(pairs->at(0));
    }
    return reply;
  });
}

Result<EtcdAll> all_of(std::string_view body) {
  return parse_reply(body, [](const json& object) {
    EtcdAll all{.pairs = {}, .revision = number_at(object.at("header"), "revision")};
    if (const auto pairs = object.find("kvs"); pairs != object.end()) {
      for (const json& pair : *pairs) all.pairs.push_back(pair_of(pair));
    }
    return all;
  });
}

Result<std::string> token_of(std::string_view body) {
  return parse_reply(body, [](const json& object) { return object.at("token").get<std::string>(); });
}

Result<WatchLine> watch_line_of(std::string_view line) {
  return parse_reply(line, [](const json& object) {
    const json& result = object.at("result");
    WatchLine watch{.is_cancelled = result.value("canceled", false),
                    .is_compacted = number_at(result, "compact_revision") > 0};
    if (const auto events = result.find("events"); events != result.end()) {
      for (const json& event : *events) {
        EtcdPair pair = pair_of(event.at("kv"));
        if (event.value("type", std::string("PUT")) == "DELETE")
          watch.changes.changes.emplace_back(EtcdErased{std::move(pair.key), pair.mod_revision});
        else
          watch.changes.changes.emplace_back(std::move(pair));
      }
    }
    return watch;
  });
}

}  // namespace kvferry::controller::scale
