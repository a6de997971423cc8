// Tests in a process of their own, which has made no CUDA context yet and may make any.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

namespace kvferry {

/// Runs the body of a test in a new process, and fails if the body failed there.
inline void in_fresh_process(void (*body)()) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // starts the program anew instead of forking a process with threads
  const auto run = [body] {
    body();
    std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
}

}  // namespace kvferry
