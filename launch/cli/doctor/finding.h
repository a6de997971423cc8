// A finding of `kvferry doctor`: what one of its checks reports.
#pragma once

#include <string>

namespace kvferry::cli {

struct Finding {
  std::string check{};   // name of the check
  std::string what{};    // a sentence that says what is wrong, without a full stop at its end
  std::string advice{};  // a sentence that says what to do, without a full stop at its end
  bool is_hint = false;  // true: not a problem, but worth knowing, for example that something could be faster
};

}  // namespace kvferry::cli
