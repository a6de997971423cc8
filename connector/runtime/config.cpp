#include "connector/runtime/config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

namespace kvferry {

using Json = nlohmann::json;

bool is_server_url(const std::string& url) {
  if (url.empty()) return true;
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (url.starts_with(scheme) && url.size() > scheme.size() && url.size() <= 512)
      return url.find_first_of(" \t\r\n") == std::string::npos && url[scheme.size()] != '/';
  }
  return false;
}

bool is_group_name(const std::string& name) {
  return name.size() <= 64 && std::ranges::all_of(name, [](unsigned char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '-' ||
                  c == '_';
         });
}

std::vector<std::string> split_nics(const std::string& names) {
  std::vector<std::string> found;
  for (std::size_t begin = 0; begin <= names.size();) {
    const std::size_t end = std::min(names.find(',', begin), names.size());
    if (end == begin) return {};
    found.push_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  return found;
}

std::span<const Setting<ConnectorConfig>> connector_settings() {
  static const std::vector<Setting<ConnectorConfig>> settings = make_connector_settings();
  return settings;
}

Result<ConnectorConfig> load_config(const std::string& extra_json, const GetEnv& get_env) {
  const Json extra = Json::parse(extra_json, nullptr, false);
  if (!extra.is_object())
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("kv_connector_extra_config is '{}'; allowed: a JSON object such as {{\"chunk_tokens\": 256}}",
                    extra_json.substr(0, 100))};
  SettingSources sources{{}, get_env, {}};
  if (const char* const named = get_env("KVFERRY_CONFIG")) sources.config_file = named;
  for (const auto& [key, value] : extra.items()) {
    const bool is_string = value.is_string();
    const SettingText text{is_string ? value.get<std::string>() : value.dump(), is_string};
    if (key == "config" && is_string) sources.config_file = text.text;
    sources.given.push_back({key, text, "kv_connector_extra_config"});
  }
  if (sources.config_file && sources.config_file->empty()) sources.config_file.reset();
  return read_settings(connector_settings(), sources);
}

Result<TransportOptions> transport_options(const ConnectorConfig& config, const std::string& gpu_bus_id) {
  TransportOptions options;
  options.path = KVFERRY_TRY(parse_path(config.path));
  options.common.silence_ns = config.silence_ms * kMillisecond;
  options.tcp.listen_host = config.advertise_host;
  options.tcp.listen_ports = KVFERRY_TRY(net::parse_port_range(config.ports));
  options.common.key = KVFERRY_TRY(net::read_cluster_key(config.cluster_key_file));
  options.tcp.encrypt = *net::parse_encrypt(config.encrypt_tcp);
  if (config.nics != "all") options.ucx.gpu_bus_id = gpu_bus_id;
  if (config.nics != "all" && config.nics != "auto") options.ucx.nics = split_nics(config.nics);
  return options;
}

}  // namespace kvferry
