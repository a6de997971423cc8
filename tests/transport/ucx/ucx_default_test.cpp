// Tests that UCX uses no TCP unless UCX_TLS allows it, and what a host without RDMA is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "tests/device/sim_device.h"
#include "tests/transport/transport_fixture.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/make_transport.h"
#include "transport/ucx/transport_names.h"
#include "transport/ucx/ucp_worker.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

/// Returns the number of TCP sockets on which this process listens.
std::size_t num_tcp_listeners() {
  std::set<std::string> own;
  std::error_code failure;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd"))
    own.insert(std::filesystem::read_symlink(fd.path(), failure).string());
  std::size_t found = 0;
  for (const char* const table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    for (std::getline(file, line); std::getline(file, line);) {
      std::istringstream words(line);
      std::string word, state, inode;
      for (int i = 0; i < 10 && words >> word; ++i) {
        if (i == 3) state = word;
        if (i == 9) inode = word;
      }
      constexpr std::string_view kListens = "0A";
      found += state == kListens && own.contains("socket:[" + inode + "]") ? 1 : 0;
    }
  }
  return found;
}

class UcxWithoutUcxTls : public ::testing::Test {
 protected:
  UcxWithoutUcxTls() { ::unsetenv("UCX_TLS"); }
  static bool has_rdma() { return static_cast<bool>(ucx::UcpWorker::create({}).value()->check_reach()); }
};

TEST_F(UcxWithoutUcxTls, OpensNoTcpPort) {
  ::testing::internal::CaptureStderr();
  {
    const auto worker = ucx::UcpWorker::create({}).value();
    EXPECT_EQ(num_tcp_listeners(), 0U);
    EXPECT_GT(worker->address().value().size(), 0U);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "UCX has nothing to say";
  let_ucx_use_tcp();
  const auto worker = ucx::UcpWorker::create({}).value();
  EXPECT_GT(num_tcp_listeners(), 0U) << "with UCX_TLS it opens them, so that this test would see them";
}

TEST_F(UcxWithoutUcxTls, IsRefusedInASentenceWhereThereIsNoRdma) {
  if (has_rdma()) GTEST_SKIP() << "this host has RDMA";
  TransportOptions options;
  options.path = Path::kUcx;
  for (const auto& made : {make_ucx_transport({}), make_transport(options)}) {
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, ErrorCode::kUnavailable);
    for (const char* const part : {"no RDMA device", "UCX_TLS=all", "the risk that a peer ends this process", "auto"})
      EXPECT_THAT(made.error().what, HasSubstr(part));
  }
  EXPECT_EQ(num_tcp_listeners(), 0U);
}

TEST_F(UcxWithoutUcxTls, AutoMovesBytesByOtherPaths) {
  if (has_rdma()) GTEST_SKIP() << "this host has RDMA";
  SimDevice device(1, SimDevice::Drive::kInBackground);
  TransportOptions options;
  options.device = &device;
  std::vector<std::byte> here(4096), there(4096, std::byte{7});
  ::testing::internal::CaptureStderr();
  const auto transport = make_transport(options).value(), owner = make_transport(options).value();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("ucx"))) << "nobody has asked for UCX";
  const RegionId region = transport->register_region(here.data(), here.size()).value();
  const std::string remote = owner->export_region(owner->register_region(there.data(), there.size()).value()).value();
  const PeerId peer = transport->connect(owner->address()).value();
  ASSERT_TRUE(transport->submit({peer, Direction::kPull, region, remote, {{0, 0, 4096}}, ""}));
  const std::vector<Completion> completions = wait_completions(*transport, 1);
  ASSERT_EQ(completions.size(), 1U);
  EXPECT_EQ(completions[0].code, ErrorCode::kOk) << completions[0].what;
  EXPECT_TRUE(here == there);
  EXPECT_THAT(transport->describe(), Not(HasSubstr("UCX")));
}

TEST(UcxTransportNames, AreReadFromTheDescriptionOfAContext) {
  const std::string description =
      "#     component 1  :  tcp\n#            md 0  :  component 0  self \n#\n"
      "#      resource 0  :  md 0  dev 0  flags -- self/memory0\n"
      "#      resource 1  :  md 1  dev 1  flags a- ud_verbs/mlx5_0:1\n"
      "#      resource 12 :  md 2  dev 11 flags -s tcp/eth0\n";
  EXPECT_THAT(ucx::names_in_context(description), UnorderedElementsAre("self", "ud_verbs", "tcp"));
  EXPECT_TRUE(ucx::names_in_context("a form that no UCX has yet").empty());
  for (const char* const name : {"rc_mlx5", "rc_verbs", "ud_mlx5", "dc_mlx5", "srd"})
    EXPECT_TRUE(ucx::is_rdma(name)) << name;
  for (const char* const name : {"tcp", "self", "posix", "sysv", "cma", "cuda_copy", "cuda_ipc", "gdr_copy", "xpmem"})
    EXPECT_FALSE(ucx::is_rdma(name)) << name;
}

}  // namespace
}  // namespace kvferry
