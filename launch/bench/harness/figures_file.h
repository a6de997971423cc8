// Where a benchmark's figures go: a file of JSON, and the picture that a script draws of it.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Into `name`; nowhere if that is empty. kUnavailable: it can't be written.
Result<void> write_json(const std::string& name, const nlohmann::json& figures);

/// Into `name` (.png), by a script of launch/bench/peers with what it needs installed on demand; nowhere if that is
/// empty. A picture that can't be drawn is a warning to `say`. kCancelled: Ctrl-C.
Result<void> draw(const std::string& name, const std::string& script, const nlohmann::json& figures,
                  const std::function<void(const std::string&)>& say);

}  // namespace kvferry::bench
