// Settings of a command, each from four places: a flag wins over the environment (KVFERRY_<KEY>), that over the YAML
// file, that over the default. Whatever is wrong is told with its key, value, place and what is allowed.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "transport/base/result.h"

namespace kvferry::cli {

struct Setting {
  std::string_view key;  // as in the file; --key and KVFERRY_KEY derive from it
  std::string_view fallback;
  std::string_view allowed;                          // for people
  std::function<bool(std::string_view)> is_allowed;  // the same for us
};

using Values = std::map<std::string, std::string, std::less<>>;

/// `flags`: key to value, only those given. The environment is read here.
/// kInvalidArgument: unreadable or malformed file, unknown key in it, or a bad value anywhere.
Result<Values> resolve(std::span<const Setting> settings, const Values& flags,
                       const std::optional<std::string>& config_file);

}  // namespace kvferry::cli
