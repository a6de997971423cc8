// The connector's settings. A new one is a field here and a row in config.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "transport/base/result.h"
#include "transport/base/settings.h"

namespace kvferry {

struct ConnectorConfig {
  std::string controller = "tcp://127.0.0.1:14600";
  std::uint32_t chunk_tokens = 256;
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;
  std::uint64_t gpu_pool_bytes = 0;
  bool lands_in_gpu = false;
  bool save_decode_cache = true;
  bool save_partial_chunks = true;
  std::string path = "auto";  // one of the names that parse_path() accepts
  std::int64_t load_timeout_ms = 5000;
  std::string advertise_host;  // empty: this host's address on the route to the controller
  std::string ports;           // a range that net::parse_port_range() accepts; empty: any port
  std::string name_space = "default";
  std::string serves;                         // URL under which routers reach this vLLM server; empty: none
  std::string cluster_key_file;               // empty: no key
  std::string encrypt_tcp = "between_hosts";  // one of net::kEncryptNames
  bool insecure = false;
  std::string config;  // path of the YAML file; empty: none
};

/// All settings, in the order in which the documentation lists them.
std::span<const Setting<ConnectorConfig>> connector_settings();

/// `extra_json`: a JSON object, as in kv_connector_extra_config; it wins over KVFERRY_<KEY> in the environment, which
/// wins over the YAML file that the key `config` names. kInvalidArgument: one sentence with the key, the value and what
/// is allowed.
Result<ConnectorConfig> load_config(const std::string& extra_json, const GetEnv& get_env);

}  // namespace kvferry
