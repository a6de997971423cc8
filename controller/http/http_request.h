// The fields of a JSON request body, each checked as it is read: what is wrong is told with the field, its value and
// what is allowed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::controller {

class HttpRequest {
 public:
  /// kInvalidArgument: not a JSON object.
  static Result<HttpRequest> parse(const std::string& body);

  /// The first of the names that is there and not null; the others are what other indexers call it. None is there:
  /// `fallback`, or an error where there is none.
  Result<std::string> text(std::initializer_list<const char*> names, std::optional<std::string> fallback) const;
  /// A text, or an integer taken as one.
  Result<std::string> name(std::initializer_list<const char*> names, std::optional<std::string> fallback) const;
  Result<std::optional<std::uint64_t>> number(std::initializer_list<const char*> names, std::uint64_t least,
                                              std::uint64_t most, bool is_needed) const;
  Result<std::vector<std::uint32_t>> tokens() const;
  /// Negative ones count as the 64 bits that they are.
  Result<std::vector<std::uint64_t>> hashes() const;
  const nlohmann::json* find(std::initializer_list<const char*> names, const char** name = nullptr) const;

 private:
  nlohmann::json body_;
};

Error bad_field(std::string_view name, const nlohmann::json* value, std::string_view allowed);

}  // namespace kvferry::controller
