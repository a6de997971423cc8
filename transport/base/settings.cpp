#include "transport/base/settings.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <system_error>

namespace kvferry {
namespace {

Error bad(std::string what) { return {ErrorCode::kInvalidArgument, std::move(what)}; }

template <class Number>
bool parse_number(std::string_view text, Number& value) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && rest == text.data() + text.size();
}

std::string variable_of(std::string_view key) {
  std::string name = "KVFERRY_";
  for (const char c : key) name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

Result<std::vector<SettingEntry>> read_file(const std::string& path) {
  try {
    if (std::error_code ignored; std::filesystem::is_directory(path, ignored))
      return bad(fmt::format("{}: the config file can't be read: it is a folder", path));
    const YAML::Node file = YAML::LoadFile(path);
    std::vector<SettingEntry> entries;
    if (file.IsNull()) return entries;
    if (!file.IsMap()) return bad(fmt::format("{}: the config file does not consist of 'key: value' lines", path));
    for (const auto& line : file) {
      const auto key = line.first.as<std::string>();
      if (line.second.IsNull())
        return bad(
            fmt::format("{}: '{}' has no value; write one after the colon (\"\" for an empty text), or remove the line",
                        path, key));
      if (!line.second.IsScalar())
        return bad(fmt::format("{}: '{}' needs a single value, not a list or a map", path, key));
      entries.push_back({key, {line.second.as<std::string>()}, path});
    }
    return entries;
  } catch (const YAML::BadFile&) {
    return bad(fmt::format("{}: the config file can't be read: {}", path, std::generic_category().message(errno)));
  } catch (const YAML::Exception& failure) {
    return bad(fmt::format("{}: the config file is not YAML of 'key: value' lines: {}", path, failure.what()));
  }
}

bool is_alias(const std::vector<SettingNames>& rows, std::string_view key) {
  return std::ranges::none_of(rows, [&](const SettingNames& names) { return names.front() == key; });
}

}  // namespace

std::string setting_text(const SettingValue& value) {
  return std::visit([](const auto& one) { return fmt::format("{}", one); }, value);
}

bool parse_setting(const SettingText& from, bool& value) {
  value = from.text == "true" || from.text == "1";
  return value || from.text == "false" || from.text == "0";
}

bool parse_setting(const SettingText& from, std::uint32_t& value) { return parse_number(from.text, value); }

bool parse_setting(const SettingText& from, std::int64_t& value) { return parse_number(from.text, value); }

bool parse_setting(const SettingText& from, std::uint64_t& value) {
  constexpr std::pair<std::string_view, unsigned> kUnits[] = {
      {"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  const std::size_t unit_at = std::min(from.text.find_first_not_of("0123456789"), from.text.size());
  const std::string_view text = from.text;
  std::uint64_t number = 0;
  if (!parse_number(text.substr(0, unit_at), number)) return false;
  for (const auto& [unit, shift] : kUnits) {
    if (text.substr(unit_at) != unit || number > std::uint64_t{1} << (63 - shift)) continue;
    value = number << shift;
    return true;
  }
  return false;
}

bool parse_setting(const SettingText& from, std::string& value) {
  value = from.text;
  return from.is_string;
}

Result<std::vector<SettingEntry>> collect_settings(const std::vector<SettingNames>& rows,
                                                   const SettingSources& sources) {
  std::vector<SettingEntry> all;
  const auto add = [&](std::vector<SettingEntry> source) {
    std::stable_partition(source.begin(), source.end(),
                          [&](const SettingEntry& entry) { return is_alias(rows, entry.key); });
    all.insert(all.end(), source.begin(), source.end());
  };
  if (sources.config_file) {
    add(KVFERRY_TRY(read_file(*sources.config_file)));
  }
  std::vector<SettingEntry> from_environment;
  for (const SettingNames& names : rows) {
    for (const std::string_view name : names) {
      const std::string variable = variable_of(name);
      if (const char* const value = sources.get_env(variable.c_str()))
        from_environment.push_back({std::string(name), {value}, variable});
    }
  }
  add(std::move(from_environment));
  add(sources.given);

  for (const SettingEntry& entry : all) {
    std::vector<std::string_view> keys;
    for (const SettingNames& names : rows) {
      if (std::ranges::find(names, entry.key) != names.end()) break;
      keys.push_back(names.front());
    }
    if (keys.size() == rows.size())
      return bad(fmt::format("{}: unknown key '{}' (value {}); allowed: {}", entry.place, entry.key, entry.value.text,
                             fmt::join(keys, ", ")));
  }
  return all;
}

Error bad_setting(const SettingEntry& entry, std::string_view allowed) {
  return bad(
      fmt::format("setting {} is '{}' (from {}); allowed: {}", entry.key, entry.value.text, entry.place, allowed));
}

}  // namespace kvferry
