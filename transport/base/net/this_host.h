// The name of this machine or pod, which nodes tell the controller.
#pragma once

#include <unistd.h>

#include <string>

namespace kvferry::net {

/// Returns the host name, or an empty text if it is unknown.
inline std::string name_of_this_host() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

}  // namespace kvferry::net
