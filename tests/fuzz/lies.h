// Makes lies: messages that differ from a well-formed one in a single value, which is wrong, huge, zero, missing,
// doubled or of another type.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvferry::fuzz {

/// Returns lies about every value of a message, at any depth, each lie once. The message must be one msgpack value. The
/// same message always gives the same lies.
std::vector<std::string> lies_about(std::string_view message);

}  // namespace kvferry::fuzz
