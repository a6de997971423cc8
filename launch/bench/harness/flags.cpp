#include "launch/bench/harness/flags.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "launch/bench/harness/byte_size.h"

namespace kvferry::bench {

Error bad_flag(std::string_view flag, std::string_view value, std::string_view allowed) {
  return {ErrorCode::kInvalidArgument, fmt::format("{} is '{}'; allowed: {}", flag, value, allowed)};
}

void FlagReader::fail(Error error) {
  if (result_) result_ = std::move(error);
}

std::uint64_t FlagReader::number(std::string_view flag, std::string_view value, std::uint64_t least,
                                 std::uint64_t most) {
  std::uint64_t parsed = 0;
  const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (failure != std::errc() || end != value.data() + value.size() || parsed < least || parsed > most)
    fail(bad_flag(flag, value, fmt::format("{} to {}", least, most)));
  return parsed;
}

std::vector<std::uint64_t> FlagReader::numbers(std::string_view flag, std::string_view value, std::uint64_t least,
                                               std::uint64_t most) {
  std::vector<std::uint64_t> numbers;
  for (const std::string& word : split_list(value)) numbers.push_back(number(flag, word, least, most));
  return numbers;
}

std::vector<std::string> FlagReader::words(std::string_view flag, std::string_view value,
                                           std::span<const std::string_view> allowed) {
  std::vector<std::string> words = split_list(value);
  for (auto word = words.begin(); word != words.end(); ++word) {
    if (std::find(allowed.begin(), allowed.end(), *word) == allowed.end() ||
        std::find(words.begin(), word, *word) != word)
      fail(bad_flag(flag, value,
                    fmt::format("one or more of {}, each once, with commas between", fmt::join(allowed, ", "))));
  }
  return words;
}

std::vector<std::string> FlagReader::peers(std::string_view value, std::span<const std::string_view> allowed) {
  return value.empty() ? std::vector<std::string>() : words("--peers", value, allowed);
}

void FlagReader::output_files(const std::string& json_file, const std::string& plot_file) {
  file("--json", json_file, "");
  file("--plot", plot_file, ".png");
}

void FlagReader::file(std::string_view flag, const std::string& name, std::string_view ending) {
  if (name.empty()) return;
  if (!name.ends_with(ending)) return fail(bad_flag(flag, name, fmt::format("a file name that ends in {}", ending)));
  std::error_code failure;
  const std::filesystem::path path(name);
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (!std::filesystem::is_directory(folder, failure) || std::filesystem::is_directory(path, failure))
    fail(bad_flag(flag, name, "a file in a folder that exists"));
}

}  // namespace kvferry::bench
