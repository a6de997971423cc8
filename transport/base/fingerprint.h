// The readable fingerprint of a model and its KV: "model=NAME kv_dtype=bfloat16 layers=32 ...". Nodes share chunks only
// where all of it is equal; what differs is told field by field.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace kvferry {

/// Fields by name. A value may hold spaces; what stands before the first field is dropped.
std::map<std::string, std::string> fingerprint_fields(std::string_view fingerprint);

/// What differs, as the end of a sentence: "kv_heads (KV heads) is 8 here and 4 there". Equal ones: empty.
std::string fingerprint_difference(std::string_view here, std::string_view there);

/// The field chunk_tokens; nullopt: it isn't there, or no number from 1 to 65536.
std::optional<std::uint32_t> chunk_tokens_of(std::string_view fingerprint);

}  // namespace kvferry
