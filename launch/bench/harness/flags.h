// Parses the values of a benchmark's flags: numbers, byte sizes (4096, 4KiB, 1.5MiB) and lists separated by commas.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::bench {

/// Parses a size: a decimal number, optionally followed by B, KiB, MiB or GiB, such as "4096" or "1.5MiB". Errors:
/// kInvalidArgument if the text is anything else, or if the size is not a whole number of bytes from 1 to 2^50.
Result<std::uint64_t> parse_byte_size(std::string_view text);

/// Returns the size in the largest unit that divides it without a remainder: "4KiB", "4097".
std::string byte_size_text(std::uint64_t bytes);

/// Returns the parts of the text between its commas, including empty parts.
std::vector<std::string> split_list(std::string_view text);

/// Returns an error kInvalidArgument with a message that names the flag, its value and the allowed values.
Error bad_flag(std::string_view flag, std::string_view value, std::string_view allowed);

/// Reads the values of flags and keeps the first error; the returned values are valid only if result() is ok.
class FlagReader {
 public:
  std::uint64_t number(std::string_view flag, std::string_view value, std::uint64_t least, std::uint64_t most);
  /// Reads numbers separated by commas.
  std::vector<std::uint64_t> numbers(std::string_view flag, std::string_view value, std::uint64_t least,
                                     std::uint64_t most);
  /// Reads one or more of the allowed words, each at most once, separated by commas.
  std::vector<std::string> words(std::string_view flag, std::string_view value,
                                 std::span<const std::string_view> allowed);
  /// Same as words() for --peers, but an empty value stands for no peers.
  std::vector<std::string> peers(std::string_view value, std::span<const std::string_view> allowed);
  /// Checks the file names given with --json and --plot; an empty name stands for no file.
  void output_files(const std::string& json_file, const std::string& plot_file);
  void fail(Error error);

  const Result<void>& result() const { return result_; }

 private:
  void file(std::string_view flag, const std::string& name, std::string_view ending);

  Result<void> result_;
};

}  // namespace kvferry::bench
