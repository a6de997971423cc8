// Tests which network cards UCX is told to use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tests/transport/base/net/pci_tree.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/make_transport.h"
#include "transport/ucx/net_devices.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using Names = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

ucx::NetDevices choice(const PciTree& host, const UcxOptions& options, const Variables& variables = {}) {
  return ucx::choose_net_devices(options, host.root(),
                                 [&](const char* name) -> const char* {
                                   const auto found = variables.find(name);
                                   return found == variables.end() ? nullptr : found->second.c_str();
                                 })
      .value();
}

UcxOptions of_gpu(const std::string& id, Names nics = {}) {
  UcxOptions options;
  options.gpu_bus_id = id;
  options.nics = std::move(nics);
  return options;
}

TEST(UcxNetDevices, AreThoseNearestToTheGpu) {
  const PciTree host("dgx_h100");
  const ucx::NetDevices devices = choice(host, of_gpu("0000:61:00.0"));
  EXPECT_EQ(devices.names, Names{"mlx5_5:1"});
  EXPECT_EQ(devices.why, "mlx5_5:1 (behind one PCIe switch with the GPU)");
  EXPECT_EQ(choice(host, of_gpu("0000:61:00.0", {"mlx5_3", "mlx5_6"})).names, Names{"mlx5_3:1"});
}

TEST(UcxNetDevices, AreLeftToUcxWithoutAGpuOrACard) {
  EXPECT_TRUE(choice(PciTree("dgx_h100"), UcxOptions{}).names.empty());
  PciTree host("");
  host.add("pci0000:00/0000:00:04.0 0 gpu");
  EXPECT_TRUE(choice(host, of_gpu("0000:00:04.0")).names.empty());
}

TEST(UcxNetDevices, TheUsersVariablesHavePriority) {
  const PciTree host("dgx_h100");
  const UcxOptions options = of_gpu("0000:61:00.0");
  EXPECT_TRUE(choice(host, options, {{"UCX_NET_DEVICES", "mlx5_0:1"}}).names.empty());
  EXPECT_EQ(choice(host, options, {{"UCX_NET_DEVICES", "mlx5_0:1"}}).why, "UCX_NET_DEVICES=mlx5_0:1");
  for (const char* transports : {"tcp,cuda_copy,sm", "^ib", "^tcp,ib"})
    EXPECT_TRUE(choice(host, options, {{"UCX_TLS", transports}}).names.empty()) << transports << " leaves out RDMA";
  for (const char* transports : {"all", "cuda,rc_x", "^tcp", "ib"})
    EXPECT_EQ(choice(host, options, {{"UCX_TLS", transports}}).names, Names{"mlx5_5:1"}) << transports;
}

TEST(UcxNetDevices, AnUnknownNameIsRefused) {
  UcxOptions options;
  options.nics = {"lo", "no_such_card"};
  const auto made = make_ucx_transport(options);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(made.error().what, HasSubstr("is called no_such_card;"));
}

TEST(UcxNetDevices, UcxUsesNoOther) {
  let_ucx_use_tcp();
  const auto all = make_ucx_transport(UcxOptions{}).value();
  UcxOptions options;
  options.nics = {"lo"};
  const auto loopback = make_ucx_transport(options).value();
  EXPECT_THAT(loopback->describe(), HasSubstr(", with lo"));
  if (std::distance(std::filesystem::directory_iterator("/sys/class/net"), {}) < 2) GTEST_SKIP() << "there is only lo";
  EXPECT_LT(loopback->address().size(), all->address().size()) << "an address names every device of a transport";
}

}  // namespace
}  // namespace kvferry
