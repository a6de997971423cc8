// The encoding of a shared record's value in etcd.
#pragma once

#include <charconv>
#include <string>
#include <string_view>

#include "transport/base/wire.h"

namespace kvferry::controller::scale {

struct RecordFields {
  std::string owner{};
  std::string value{};
  std::uint64_t version = 0;
  std::uint64_t left_ms = 0;  // time from the writing of the record to its deadline
  KVFERRY_FIELDS(owner, value, version, left_ms);
};

/// Decodes a shared record. If `bytes` are malformed, returns version 0, which any other version replaces.
inline RecordFields record_fields_of(std::string_view bytes) {
  Result<RecordFields> fields = decode<RecordFields>(bytes, "shared record");
  return fields ? std::move(*fields) : RecordFields{};
}

/// Returns the number that the leading digits of `text` form, or 0 if there are no digits.
inline std::uint64_t number_of(std::string_view text) {
  std::uint64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace kvferry::controller::scale
