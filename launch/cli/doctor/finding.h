// What a check of `kvferry doctor` reports.
#pragma once

#include <string>

namespace kvferry::cli {

struct Finding {
  std::string check{};   // name of the check
  std::string what{};    // what is wrong, a sentence without its full stop
  std::string advice{};  // what to do, likewise
  bool is_hint = false;  // all works, but slower or with less comfort than it could
};

}  // namespace kvferry::cli
