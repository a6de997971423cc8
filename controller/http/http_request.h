// The fields of a JSON request body, checked as they are read. An error names the field, its value and what is allowed.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::controller {

/// Ends a request with an error: HttpApi::answer() catches it. Thrown only on the thread that called HttpApi::answer(),
/// never on the owner thread.
struct HttpFailure : std::exception {
  explicit HttpFailure(Error why) : error(std::move(why)) {}
  Error error;
};

inline void check(const Result<void>& result) {
  if (!result) throw HttpFailure(result.error());
}
template <class T>
T checked(Result<T> result) {
  if (!result) throw HttpFailure(std::move(result).error());
  return *std::move(result);
}

/// Throws HttpFailure with the field's name, its value (nullptr: missing) and what is allowed.
[[noreturn]] void bad_field(std::string_view name, const nlohmann::json* value, std::string_view allowed);

/// All functions but find() throw HttpFailure (kInvalidArgument) if a required field is missing or a value is not
/// allowed.
class HttpRequest {
 public:
  /// Parses the body of a request. Throws if `body` is not a JSON object or has more than 8 levels.
  explicit HttpRequest(const std::string& body);

  /// Returns the first field of `names` that is present and not null; clients of different indexers name a field
  /// differently. If there is none, returns `fallback`, or throws if there is no fallback.
  std::string text(std::initializer_list<const char*> names, std::optional<std::string> fallback) const;
  /// Same as text(), but also accepts an integer and returns its digits.
  std::string name(std::initializer_list<const char*> names, std::optional<std::string> fallback) const;
  /// Returns an integer from `least` to `most`. If the field is missing, returns nullopt, or throws if `is_needed` is
  /// true.
  std::optional<std::uint64_t> number(std::initializer_list<const char*> names, std::uint64_t least, std::uint64_t most,
                                      bool is_needed) const;
  std::vector<std::uint32_t> tokens() const;
  /// Returns the hashes of a prompt's blocks. A negative hash stands for its 64-bit two's complement.
  std::vector<std::uint64_t> hashes() const;
  const nlohmann::json* find(std::initializer_list<const char*> names, const char** name = nullptr) const;

 private:
  nlohmann::json body_;
};

}  // namespace kvferry::controller
