#include "launch/cli/settings.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <vector>

namespace kvferry::cli {
namespace {

Error bad(std::string what) { return {ErrorCode::kInvalidArgument, std::move(what)}; }

std::string keys_of(std::span<const Setting> settings) {
  std::vector<std::string_view> keys;
  for (const Setting& setting : settings) keys.push_back(setting.key);
  return fmt::format("{}", fmt::join(keys, ", "));
}

Result<Values> read_file(std::span<const Setting> settings, const std::string& path) {
  try {
    const YAML::Node file = YAML::LoadFile(path);
    Values values;
    if (file.IsNull()) return values;
    if (!file.IsMap()) return bad(fmt::format("{}: not a list of 'key: value' lines", path));
    for (const auto& line : file) {
      const auto key = line.first.as<std::string>();
      const bool known =
          std::any_of(settings.begin(), settings.end(), [&](const Setting& setting) { return setting.key == key; });
      if (!known) return bad(fmt::format("{}: unknown key '{}'; allowed: {}", path, key, keys_of(settings)));
      if (!line.second.IsScalar()) return bad(fmt::format("{}: the value of '{}' is not a single value", path, key));
      values[key] = line.second.as<std::string>();
    }
    return values;
  } catch (const YAML::BadFile&) {
    return bad(fmt::format("{}: the config file can't be read", path));
  } catch (const YAML::Exception& failure) {
    return bad(fmt::format("{}: {}", path, failure.what()));
  }
}

std::string variable_of(std::string_view key) {
  std::string name = "KVFERRY_";
  for (const char c : key) name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

}  // namespace

Result<Values> resolve(std::span<const Setting> settings, const Values& flags,
                       const std::optional<std::string>& config_file) {
  Values from_file;
  if (config_file) {
    Result<Values> read = read_file(settings, *config_file);
    if (!read) return read;
    from_file = std::move(*read);
  }
  Values values;
  for (const Setting& setting : settings) {
    const std::string variable = variable_of(setting.key);
    const auto check = [&](std::string_view value, std::string_view place) -> Result<void> {
      if (setting.is_allowed(value)) return {};
      return bad(fmt::format("{} is '{}' ({}); allowed: {}", setting.key, value, place, setting.allowed));
    };
    // From the weakest place to the strongest; each is checked, also where a stronger one covers it.
    std::string value(setting.fallback);
    if (const auto found = from_file.find(setting.key); found != from_file.end()) {
      value = found->second;
      if (Result<void> checked = check(value, *config_file); !checked) return std::move(checked).error();
    }
    if (const char* found = std::getenv(variable.c_str()); found != nullptr) {
      value = found;
      if (Result<void> checked = check(value, variable); !checked) return std::move(checked).error();
    }
    if (const auto found = flags.find(setting.key); found != flags.end()) {
      value = found->second;
      if (Result<void> checked = check(value, fmt::format("--{}", setting.key)); !checked)
        return std::move(checked).error();
    }
    values[std::string(setting.key)] = std::move(value);
  }
  return values;
}

}  // namespace kvferry::cli
