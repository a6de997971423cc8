#include "launch/bench/harness/byte_size.h"

#include <array>
#include <cmath>
#include <cstdlib>

namespace kvferry::bench {
namespace {

struct Unit {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array<Unit, 3> kUnits{{{"GiB", 1ULL << 30}, {"MiB", 1ULL << 20}, {"KiB", 1ULL << 10}}};
constexpr double kBytesMax = 1ULL << 50;  // a larger value is taken for a typing error

}  // namespace

Result<std::uint64_t> parse_byte_size(std::string_view text) {
  const Error bad{ErrorCode::kInvalidArgument,
                  fmt::format("'{}' is not a size; allowed: bytes as 4096, or 4KiB, 1.5MiB, 1GiB", text)};
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
  if (*end != '\0' || value < 1 || value > kBytesMax || value != std::floor(value)) return bad;
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

}  // namespace kvferry::bench
