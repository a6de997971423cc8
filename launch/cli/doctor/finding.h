// A finding of `kvferry doctor`: what one of its checks reports.
#pragma once

#include <string>

namespace kvferry::cli {

struct Finding {
  std::string check{};   // name of the check
  std::string what{};    // what is wrong, a sentence without its full stop
  std::string advice{};  // what to do, also without a full stop
  bool is_hint = false;  // true if everything works, but could be faster or easier to operate
};

}  // namespace kvferry::cli
