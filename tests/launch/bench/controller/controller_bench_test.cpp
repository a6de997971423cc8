// Tests `kvferry bench controller`: its flags, and that a small run reports every figure that the help promises.
#include "launch/bench/controller/controller_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace kvferry::bench {
namespace {

using ::testing::HasSubstr;

TEST(ControllerBench, RefusesBadFlagsAndSaysWhatIsAllowed) {
  for (const char* hashes : {"", "0", "65535", "100000001", "1M", "-5", "1e6"}) {
    const Result<void> done = run_controller_bench({.hashes = hashes});
    ASSERT_FALSE(done) << hashes;
    EXPECT_EQ(done.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(done.error().what, HasSubstr("--hashes"));
    EXPECT_THAT(done.error().what, HasSubstr("a whole number from 65536 to 100000000"));
  }
  EXPECT_THAT(run_controller_bench({.repeat = "0"}).error().what,
              HasSubstr("--repeat is '0'; allowed: a whole number from 1 to 100"));
  EXPECT_THAT(run_controller_bench({.plot_file = "x.jpg"}).error().what,
              HasSubstr("--plot is 'x.jpg'; allowed: a file"));
  EXPECT_THAT(run_controller_bench({.json_file = "/no/folder/x"}).error().what, HasSubstr("--json is '/no/folder/x'"));
}

TEST(ControllerBench, ASmallRunGivesEveryFigure) {
  const std::string file = testing::TempDir() + "controller_bench." + std::to_string(::getpid()) + ".json";
  const Result<void> done = run_controller_bench({.hashes = "65536", .repeat = "1", .json_file = file});
  ASSERT_TRUE(done) << done.error().what;
  const nlohmann::json figures = nlohmann::json::parse(std::ifstream(file));
  ::unlink(file.c_str());
  for (const char* name : {"lookup_128_per_s",
                           "lookup_128_us_p99",
                           "lookup_1024_per_s",
                           "packed_event_hashes_per_s",
                           "bytes_per_hash_64",
                           "bytes_per_hash_128",
                           "bytes_per_hash_64_random_replicas",
                           "random_lines_128_per_s",
                           "worst_lookup_us_node_dies",
                           "directory_lookup_128_per_s",
                           "remote_zmq_us_p50",
                           "remote_zmq_us_p99",
                           "empty_zmq_us_p50",
                           "empty_zmq_us_p99",
                           "remote_stream_us_p50",
                           "remote_stream_us_p99",
                           "empty_stream_us_p50",
                           "empty_stream_us_p99",
                           "remote_per_s_per_core",
                           "remote_zmq_per_s_per_core",
                           "visible_us_p99",
                           "vllm_event_hashes_per_s",
                           "recovery_s",
                           "cold_resync_s",
                           "worst_lookup_us_while_snapshot"}) {
    ASSERT_TRUE(figures.contains(name)) << name;
    EXPECT_GT(figures[name].get<double>(), 0) << name;
  }
  EXPECT_EQ(figures["hashes"], 65536);
}

}  // namespace
}  // namespace kvferry::bench
