// The flags of a benchmark, which arrive as typed.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::bench {

/// kInvalidArgument with a sentence that names the flag, its value and what is allowed.
Error bad_flag(std::string_view flag, std::string_view value, std::string_view allowed);

/// Reads the values of flags and keeps the first error; the values count only if result() is ok.
class FlagReader {
 public:
  std::uint64_t number(std::string_view flag, std::string_view value, std::uint64_t least, std::uint64_t most);
  /// Numbers separated by commas.
  std::vector<std::uint64_t> numbers(std::string_view flag, std::string_view value, std::uint64_t least,
                                     std::uint64_t most);
  /// One or more of the allowed words, each at most once, separated by commas.
  std::vector<std::string> words(std::string_view flag, std::string_view value,
                                 std::span<const std::string_view> allowed);
  /// As words(), but an empty value stands for no peers.
  std::vector<std::string> peers(std::string_view value, std::span<const std::string_view> allowed);
  /// The names of the files for --json and --plot; an empty name stands for no file.
  void output_files(const std::string& json_file, const std::string& plot_file);
  void fail(Error error);

  const Result<void>& result() const { return result_; }

 private:
  void file(std::string_view flag, const std::string& name, std::string_view ending);

  Result<void> result_;
};

}  // namespace kvferry::bench
