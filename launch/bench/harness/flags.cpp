#include "launch/bench/harness/flags.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>

namespace kvferry::bench {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array<Unit, 3> kUnits{{{"GiB", 1ULL << 30}, {"MiB", 1ULL << 20}, {"KiB", 1ULL << 10}}};
constexpr double kFlagBytesMax = 1ULL << 50;  // a larger size is rejected as a typing error

}  // namespace

Result<std::uint64_t> parse_byte_size(std::string_view text) {
  const Error bad{
      ErrorCode::kInvalidArgument,
      fmt::format(
          "'{}' is not a size; allowed: a whole number of bytes from 1 to 2^50, such as 4096, 4KiB, 1.5MiB or 1GiB",
          text)};
  const std::size_t digits = text.find_first_not_of("0123456789.");
  const std::string number(text.substr(0, digits));
  const std::string_view unit = digits == std::string_view::npos ? "" : text.substr(digits);
  std::uint64_t factor = unit.empty() || unit == "B" ? 1 : 0;
  for (const Unit& known : kUnits) {
    if (unit == known.name) factor = known.bytes;
  }
  if (factor == 0 || number.empty() || number.size() > 20 || number.front() == '.') return bad;
  char* end = nullptr;
  const double value = std::strtod(number.c_str(), &end) * static_cast<double>(factor);
  if (*end != '\0' || value < 1 || value > kFlagBytesMax || value != std::floor(value)) return bad;
  return static_cast<std::uint64_t>(value);
}

std::string byte_size_text(std::uint64_t bytes) {
  for (const Unit& unit : kUnits) {
    if (bytes != 0 && bytes % unit.bytes == 0) return fmt::format("{}{}", bytes / unit.bytes, unit.name);
  }
  return std::to_string(bytes);
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    words.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

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
    fail(bad_flag(flag, value, fmt::format("a whole number from {} to {}", least, most)));
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
                    fmt::format("one or more of {}, each once, separated by commas", fmt::join(allowed, ", "))));
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
    fail(bad_flag(flag, name, "a file, not a folder, in a folder that exists"));
}

}  // namespace kvferry::bench
