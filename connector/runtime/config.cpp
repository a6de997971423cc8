#include "connector/runtime/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "controller/api/endpoint.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

using Json = nlohmann::json;

Error bad_value(std::string_view key, const Json& value, std::string_view allowed) {
  return {ErrorCode::kInvalidArgument,
          fmt::format("bad value {} for key '{}'; allowed: {}", value.dump(), key, allowed)};
}

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  std::uint64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  const std::string_view unit(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  constexpr std::pair<std::string_view, unsigned> kUnits[] = {
      {"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  for (const auto& [name, shift] : kUnits) {
    if (unit == name && number <= (std::uint64_t{1} << (63 - shift))) return number << shift;
  }
  return std::nullopt;
}

/// Whether it is a number of bytes.
bool bytes(const Json& value, std::uint64_t& out) {
  const auto n = value.is_number_unsigned() ? std::optional(value.get<std::uint64_t>())
                 : value.is_string()        ? parse_bytes(value.get<std::string>())
                                            : std::nullopt;
  out = n.value_or(out);
  return n.has_value();
}

struct Key {
  std::string_view name;
  std::string_view allowed;
  bool (*set)(ConnectorConfig&, const Json&);  // false: not allowed
};

std::optional<std::int64_t> integer(const Json& value) {
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (!value.is_string()) return std::nullopt;
  const auto text = value.get<std::string>();
  std::int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || rest != text.data() + text.size()) return std::nullopt;
  return number;
}

bool boolean(const Json& value, bool& out) {
  if (value.is_boolean()) return out = value.get<bool>(), true;
  if (value == "true" || value == "1") return out = true, true;
  if (value == "false" || value == "0") return out = false, true;
  return false;
}

bool text(const Json& value, std::string& out) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) return false;
  out = value.get<std::string>();
  return true;
}

bool is_server_url(std::string_view url) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (url.starts_with(scheme) && url.size() > scheme.size() && url.size() <= 512)
      return url.find_first_of(" \t\r\n") == std::string_view::npos && url[scheme.size()] != '/';
  }
  return false;
}

const Key kKeys[] = {
    {"controller",
     "tcp://HOST:PORT, ipc://PATH, unix:///ABSOLUTE/PATH or stream://HOST:PORT; of replicas several, with commas",
     [](ConnectorConfig& c, const Json& v) {
       return text(v, c.controller) && controller::split_endpoints(c.controller);
     }},
    {"chunk_tokens", "an integer from 1 to 65536, a multiple of the block size",
     [](ConnectorConfig& c, const Json& v) {
       const auto n = integer(v);
       if (!n || *n < 1 || *n > 65536) return false;
       c.chunk_tokens = static_cast<std::uint32_t>(*n);
       return true;
     }},
    {"pool_bytes", "a number of bytes, or a string like \"512MiB\" or \"4GiB\"",
     [](ConnectorConfig& c, const Json& v) { return bytes(v, c.pool_bytes) && c.pool_bytes > 0; }},
    {"gpu_pool_bytes", "a number of bytes, or a string like \"512MiB\" or \"4GiB\"; 0: none",
     [](ConnectorConfig& c, const Json& v) { return bytes(v, c.gpu_pool_bytes); }},
    {"lands_in_gpu", "true or false", [](ConnectorConfig& c, const Json& v) { return boolean(v, c.lands_in_gpu); }},
    {"save_decode_cache", "true or false",
     [](ConnectorConfig& c, const Json& v) { return boolean(v, c.save_decode_cache); }},
    {"save_unfull_chunk", "true or false",
     [](ConnectorConfig& c, const Json& v) { return boolean(v, c.save_unfull_chunk); }},
    {"path", "\"auto\", \"shm\", \"cma\", \"ucx\", \"tcp\", \"nccl\" or \"gpu_ipc\"",
     [](ConnectorConfig& c, const Json& v) { return text(v, c.path) && parse_path(c.path); }},
    {"load_timeout_ms", "an integer from 1 to 600000",
     [](ConnectorConfig& c, const Json& v) {
       const auto n = integer(v);
       if (!n || *n < 1 || *n > 600000) return false;
       c.load_timeout_ms = *n;
       return true;
     }},
    {"advertise_host", "a host name or address that the other nodes reach",
     [](ConnectorConfig& c, const Json& v) { return text(v, c.advertise_host); }},
    {"serves", "http://HOST:PORT or https://HOST:PORT, where routers reach this server; empty: they are told none",
     [](ConnectorConfig& c, const Json& v) {
       if (v == "") return c.serves.clear(), true;
       return text(v, c.serves) && is_server_url(c.serves);
     }},
    {"namespace", "a name; nodes of one namespace serve one model",
     [](ConnectorConfig& c, const Json& v) { return text(v, c.name_space); }},
};

Result<void> apply(ConnectorConfig& config, const std::string& name, const Json& value, std::string_view where) {
  if (name == "config") return {};
  for (const Key& key : kKeys) {
    if (key.name != name) continue;
    if (!key.set(config, value)) return bad_value(name, value, key.allowed).with(where);
    return {};
  }
  std::string names = "config";
  for (const Key& key : kKeys) names += fmt::format(", {}", key.name);
  return Error{ErrorCode::kInvalidArgument,
               fmt::format("{}: unknown key '{}' (value {}); allowed keys: {}", where, name, value.dump(), names)};
}

Result<void> apply_file(ConnectorConfig& config, const std::string& path) {
  YAML::Node file;
  try {
    file = YAML::LoadFile(path);
  } catch (const std::exception& failure) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("config file '{}' can't be read: {}", path, failure.what())};
  }
  if (!file.IsMap()) {
    return Error{ErrorCode::kInvalidArgument, fmt::format("config file '{}' is not a list of KEY: VALUE lines", path)};
  }
  for (const auto& entry : file) {
    if (!entry.first.IsScalar() || !entry.second.IsScalar())
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("config file '{}' has a key whose value is not a scalar", path)};
    auto done = apply(config, entry.first.Scalar(), Json(entry.second.Scalar()), path);
    if (!done) return done;
  }
  return {};
}

}  // namespace

Result<ConnectorConfig> load_config(const std::string& extra_json, const GetEnv& get_env) {
  const Json extra = Json::parse(extra_json, nullptr, false);
  if (!extra.is_object()) return Error{ErrorCode::kInvalidArgument, "kv_connector_extra_config is not a JSON object"};
  ConnectorConfig config;
  std::string file;
  if (const char* named = get_env("KVFERRY_CONFIG")) file = named;
  if (extra.contains("config") && !text(extra["config"], file)) return bad_value("config", extra["config"], "a path");
  if (!file.empty()) {
    if (auto done = apply_file(config, file); !done) return std::move(done).error();
  }
  for (const Key& key : kKeys) {
    std::string variable = "KVFERRY_";
    for (const char c : key.name) variable += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    if (const char* value = get_env(variable.c_str())) {
      if (auto done = apply(config, std::string(key.name), Json(value), variable); !done)
        return std::move(done).error();
    }
  }
  for (const auto& [name, value] : extra.items()) {
    if (auto done = apply(config, name, value, "kv_connector_extra_config"); !done) return std::move(done).error();
  }
  return config;
}

}  // namespace kvferry
