// The connector's settings: kv_connector_extra_config first, then KVFERRY_<KEY> in the environment, then a YAML file
// named by the key `config`, then the default. An unknown key or a bad value is an error that says what is allowed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "transport/base/result.h"

namespace kvferry {

struct ConnectorConfig {
  std::string controller = "tcp://127.0.0.1:14600";
  std::uint32_t chunk_tokens = 256;
  std::uint64_t pool_bytes = std::uint64_t{1} << 30;
  std::uint64_t gpu_pool_bytes = 0;
  bool lands_in_gpu = false;
  bool save_decode_cache = true;
  bool save_unfull_chunk = true;
  std::string path = "auto";  // as parse_path() of transport/make_transport.h knows them
  std::int64_t load_timeout_ms = 5000;
  std::string advertise_host;  // where other nodes reach this one; empty: the route to the controller tells
  std::string name_space = "default";
  std::string serves;  // URL under which routers reach this vLLM server; empty: they are told none
};

/// The environment, handed in: nullptr where the variable isn't set.
using GetEnv = std::function<const char*(const char*)>;

/// `extra_json`: a JSON object as in kv_connector_extra_config. kInvalidArgument: one sentence with the key, the value
/// and what is allowed.
Result<ConnectorConfig> load_config(const std::string& extra_json, const GetEnv& get_env);

}  // namespace kvferry
