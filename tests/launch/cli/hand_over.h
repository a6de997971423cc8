// Runs the `kvferry` binary, and gives two nodes of tests something that it can tell about.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "tests/connector/runtime/test_node.h"

namespace kvferry {

struct Output {
  int status = -1;
  std::string text;
};

inline Output run_kvferry(const std::string& arguments) {
  Output output;
  std::FILE* pipe = ::popen((KVFERRY_BINARY " " + arguments + " 2>&1").c_str(), "r");
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output.text += static_cast<char>(c);
  output.status = WEXITSTATUS(::pclose(pipe));
  return output;
}

/// Computes the prompt on `from`, and hands it over to `to`, where the request is finished. The ids are those that vLLM
/// gives to the client's request `id`. `between` runs before the request comes to `to`.
inline void hand_over(
    TestNode& from, TestNode& to, const std::string& id, std::uint32_t num_loaded,
    const std::function<void()>& between = [] {}, std::int32_t first_token = 100, const std::string& trace = {}) {
  const std::vector<std::int32_t> prompt = tokens(21, first_token);
  NewRequest first = new_request("cmpl-" + id + "-0-11111111", prompt);
  first.handoff = true;
  first.trace = trace;
  from.scheduler->add_request(first);
  from.lookup(first.id.value);
  from.scheduler->allocated(first.id, 0, {kSomeBlocks});
  from.step({{{first.id, 0, 21, BlockTable{kSomeBlocks}}}, {}}, [&] { from.compute(kSomeBlocks, 0, 21, 1); });
  const FinishedRequest done = from.scheduler->finished(first.id, 21, {kSomeBlocks}, false);
  NewRequest second = new_request("cmpl-" + id + "-0-22222222", prompt);
  second.source = HandoffSource{from.endpoint(), done.handoff_name, done.handoff_tokens};
  second.trace = trace;
  between();
  EXPECT_EQ(load(to, second, 1), num_loaded);
  to.scheduler->finished(second.id, 21, {kOtherBlocks}, false);
}

}  // namespace kvferry
