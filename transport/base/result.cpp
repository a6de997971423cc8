#include "transport/base/result.h"

#include <array>

namespace kvferry {

std::string_view name_of(ErrorCode code) {
  // The names are in the order of ErrorCode.
  constexpr std::array<std::string_view, 11> kNames = {"ok",        "invalid argument", "not found",     "full",
                                                       "timed out", "cancelled",        "peer lost",     "corrupt",
                                                       "refused",   "unavailable",      "internal error"};
  const auto index = static_cast<std::size_t>(code);
  return index < kNames.size() ? kNames[index] : "unknown error";
}

std::string Error::str() const { return fmt::format("{} [{}:{}]", what, where.file, where.line); }

}  // namespace kvferry
