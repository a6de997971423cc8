#pragma once

#include <cstdlib>
#include <string>
#include <utility>

#include "connector/python/src/python_error.h"
#include "connector/runtime/config.h"
#include "connector/runtime/net_address.h"

namespace kvferry {

/// Returns the settings in effect: those of kv_connector_extra_config, the environment and the file. A name in
/// advertise_host is replaced by an address of this host.
inline ConnectorConfig config_from(const std::string& extra_json) {
  ConnectorConfig config = unwrap(load_config(extra_json, [](const char* name) { return std::getenv(name); }));
  if (!config.advertise_host.empty()) {
    Result<std::string> address = address_of_this_host(config.advertise_host, config.controller);
    if (!address) address = std::move(address).error().with("advertise_host");
    config.advertise_host = unwrap(std::move(address));
  }
  return config;
}

}  // namespace kvferry
