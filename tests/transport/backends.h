// Backends by name, for the two processes of a test to have the same.
#pragma once

#include <memory>
#include <string_view>

#include "transport/base/check.h"
#include "transport/make_transport.h"

namespace kvferry {

inline std::unique_ptr<Transport> make_backend(std::string_view name, std::uint32_t transfers_max = 1024) {
  if (name == "ucx") {
    UcxOptions options;
    options.transfers_max = transfers_max;
    return make_ucx_transport(options).value();
  }
  if (name == "shm" || name == "cma") {
    ShmOptions options;
    options.transfers_max = transfers_max;
    options.use_mappings = name == "shm";
    return make_shm_transport(options).value();
  }
  check_failed("name", __FILE__, __LINE__, fmt::format("no backend is called {}", name));
}

}  // namespace kvferry
