// The settings engine of the connector and of the commands. A table has one row for each setting. The sources of a
// setting's value, from the highest precedence to the lowest: the caller (flags, or vLLM's extra config), KVFERRY_<KEY>
// in the environment, a YAML file, the default.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "transport/base/result.h"

namespace kvferry {

using SettingValue = std::variant<bool, std::int64_t, std::uint64_t, std::string>;
std::string setting_text(const SettingValue& value);

/// The text of a setting, as found in one of its sources.
struct SettingText {
  std::string text;
  bool is_string = true;  // false: a JSON number, boolean or anything else that is not a string
};

/// Parses a setting's value; returns false if the text is not of this type. Byte counts (std::uint64_t) may end in KiB,
/// MiB, GiB or TiB.
bool parse_setting(const SettingText& from, bool& value);
bool parse_setting(const SettingText& from, std::uint32_t& value);
bool parse_setting(const SettingText& from, std::int64_t& value);
bool parse_setting(const SettingText& from, std::uint64_t& value);
bool parse_setting(const SettingText& from, std::string& value);

/// One row of a settings table; `Options` is the struct that the settings fill. The default is the field's initializer.
template <class Options>
struct Setting {
  std::string_view key;  // name of the setting, from which --key and KVFERRY_KEY derive
  std::string allowed;   // text after "allowed: " in messages
  std::string help;      // one sentence, without its full stop
  std::function<bool(Options&, const SettingText&)> set;  // returns false if the value is not allowed
  std::function<SettingValue(const Options&)> get;
  std::vector<std::string_view> aliases = {};  // former names of the key, still accepted
  std::string shown_default = {};              // text of the default in help texts; empty: the default itself

  Setting&& with_alias(std::string_view alias) && {
    aliases.push_back(alias);
    return std::move(*this);
  }
  Setting&& with_shown_default(std::string text) && {
    shown_default = std::move(text);
    return std::move(*this);
  }
};

/// Makes a table row for `field`. `is_allowed` checks a value that has the right type.
template <class Options, class Value>
Setting<Options> setting(std::string_view key, Value Options::*field, std::string allowed, std::string help,
                         std::function<bool(const Value&)> is_allowed = {}) {
  const auto set = [field, is_allowed = std::move(is_allowed)](Options& options, const SettingText& from) {
    Value value{};
    if (!parse_setting(from, value) || (is_allowed && !is_allowed(value))) return false;
    options.*field = std::move(value);
    return true;
  };
  const auto get = [field](const Options& options) -> SettingValue {
    if constexpr (std::is_same_v<Value, std::uint32_t>)
      return std::int64_t{options.*field};
    else
      return options.*field;
  };
  return {key, std::move(allowed), std::move(help), set, get};
}

/// One value for one key, and where it was found, for error messages.
struct SettingEntry {
  std::string key;
  SettingText value;
  std::string place;
};

using GetEnv = std::function<const char*(const char*)>;  // returns nullptr if the variable is not set

struct SettingSources {
  std::optional<std::string> config_file;  // path of a YAML file
  GetEnv get_env;
  std::vector<SettingEntry> given;  // entries of the flags, or of vLLM's extra config
};

/// Names of a row: its key, then its aliases.
using SettingNames = std::vector<std::string_view>;

/// Returns all entries, those of the source with the lowest precedence first; within a source, aliases come first. The
/// last entry of a setting wins. Only the rows' environment variables are read. kInvalidArgument: the file is
/// unreadable or malformed, or a key is unknown.
Result<std::vector<SettingEntry>> collect_settings(const std::vector<SettingNames>& rows,
                                                   const SettingSources& sources);

Error bad_setting(const SettingEntry& entry, std::string_view allowed);

/// Fills `Options` from the sources. Every value is checked, also one that a source of higher precedence overrides.
/// kInvalidArgument: collect_settings() failed, or a value is not allowed; the message has the key, value and place,
/// and what is allowed.
template <class Options>
Result<Options> read_settings(std::span<const Setting<Options>> table, const SettingSources& sources) {
  std::vector<SettingNames> names;
  for (const Setting<Options>& row : table) {
    names.push_back({row.key});
    names.back().insert(names.back().end(), row.aliases.begin(), row.aliases.end());
  }
  std::vector<SettingEntry> entries = KVFERRY_TRY(collect_settings(names, sources));
  Options options;
  for (const SettingEntry& entry : entries) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (std::find(names[i].begin(), names[i].end(), entry.key) == names[i].end()) continue;
      if (!table[i].set(options, entry.value)) return bad_setting(entry, table[i].allowed);
    }
  }
  return options;
}

/// Returns the default of a row as help texts show it.
template <class Options>
std::string default_text(const Setting<Options>& row) {
  return row.shown_default.empty() ? setting_text(row.get(Options{})) : row.shown_default;
}

/// Returns the table as Markdown, for the generated page of settings.
template <class Options>
std::string settings_markdown(std::span<const Setting<Options>> table) {
  std::string page = "| key | default | allowed | meaning |\n|---|---|---|---|\n";
  for (const Setting<Options>& row : table) {
    const std::string text = default_text(row);
    const std::string shown = text.empty() || !row.shown_default.empty() ? text : "`" + text + "`";
    page += fmt::format("| `{}` | {} | {} | {} |\n", row.key, shown, row.allowed, row.help);
  }
  return page;
}

}  // namespace kvferry
