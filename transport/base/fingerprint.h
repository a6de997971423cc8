// The readable fingerprint of a model and its KV: "model=NAME kv_dtype=bfloat16 layers=32 ...". Nodes share chunks only
// if all fields are equal; a refusal lists the fields that differ.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace kvferry {

/// Returns the fields by name. A value may contain spaces; text before the first field is ignored.
std::map<std::string, std::string> fingerprint_fields(std::string_view fingerprint);

/// Returns the differences as the end of a sentence: "kv_heads (KV heads) is '8' here and '4' there"; an empty
/// text if there is no difference.
std::string fingerprint_difference(std::string_view here, std::string_view there);

/// Returns the field chunk_tokens, or nullopt if it is missing or not a number from 1 to 65536.
std::optional<std::uint32_t> chunk_tokens_of(std::string_view fingerprint);

}  // namespace kvferry
