// Turns broken promises into exceptions, so that a test can expect one and the simulator can report its seed.
#pragma once

#include <stdexcept>

#include "transport/base/check.h"

namespace kvferry::sim {

struct BrokenPromise : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ChecksThrow {
 public:
  ChecksThrow() : before_(set_check_handler([](const std::string& message) { throw BrokenPromise(message); })) {}
  ~ChecksThrow() { set_check_handler(before_); }
  ChecksThrow(const ChecksThrow&) = delete;
  ChecksThrow& operator=(const ChecksThrow&) = delete;

 private:
  CheckHandler before_;
};

}  // namespace kvferry::sim

/// Expects that the statement breaks the promise whose name the exception's message contains.
#define EXPECT_BREAKS(statement, promise)                                                    \
  try {                                                                                      \
    statement;                                                                               \
    ADD_FAILURE() << #statement " breaks no promise, expected " << (promise);                \
  } catch (const ::kvferry::sim::BrokenPromise& broken) {                                    \
    EXPECT_NE(std::string(broken.what()).find(promise), std::string::npos) << broken.what(); \
  }
