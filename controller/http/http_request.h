// The fields of a JSON request body, checked as they are read. An error names the field, its value and what is allowed.
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

  /// Returns the first of `names` that is present and not null (other indexers use other names for a field), else
  /// `fallback`, else an error.
  Result<std::string> text(std::initializer_list<const char*> names, std::optional<std::string> fallback) const;
  /// As text(); an integer counts as its digits.
  Result<std::string> name(std::initializer_list<const char*> names, std::optional<std::string> fallback) const;
  Result<std::optional<std::uint64_t>> number(std::initializer_list<const char*> names, std::uint64_t least,
                                              std::uint64_t most, bool is_needed) const;
  Result<std::vector<std::uint32_t>> tokens() const;
  /// A negative hash stands for its 64-bit two's complement.
  Result<std::vector<std::uint64_t>> hashes() const;
  const nlohmann::json* find(std::initializer_list<const char*> names, const char** name = nullptr) const;

 private:
  nlohmann::json body_;
};

/// Assigns the values of several fields and keeps the first error.
struct FirstError {
  std::optional<Error> error;

  template <class T, class Value>
  void set(T& field, Result<Value> value) {
    if (value)
      field = *std::move(value);
    else if (!error)
      error = std::move(value).error();
  }
};

/// `value`: nullptr if the field is missing.
Error bad_field(std::string_view name, const nlohmann::json* value, std::string_view allowed);

}  // namespace kvferry::controller
