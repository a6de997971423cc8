// What a check of `kvferry doctor` reports.
#pragma once

#include <string>

namespace kvferry::cli {

struct Finding {
  std::string check{};   // name of the check
  std::string what{};    // what is wrong, a sentence without its full stop
  std::string advice{};  // what to do, also without a full stop
  bool is_hint = false;  // everything works, but it could be faster or easier to operate
};

}  // namespace kvferry::cli
