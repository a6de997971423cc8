#include "transport/base/net/near_nics.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <set>

#include "pci_tree.h"

namespace kvferry::net {
namespace {

using Names = std::vector<std::string>;

/// Returns the cards of each GPU, in the order of the bus: "mlx5_0:1 | mlx5_1:1, mlx5_2:1".
std::string choices(const PciTree& host, const Names& allowed = {}) {
  Names all;
  for (const std::string& gpu : gpus_of_host(host.root()))
    all.push_back(fmt::format("{}", fmt::join(nics_near(host.root(), gpu, allowed).nics, ", ")));
  return fmt::format("{}", fmt::join(all, " | "));
}

TEST(NearNics, AGpuOfADgxH100GetsTheCardBehindItsSwitchAndNoneForStorage) {
  const PciTree host("dgx_h100");
  EXPECT_EQ(choices(host), "mlx5_0:1 | mlx5_3:1 | mlx5_4:1 | mlx5_5:1 | mlx5_6:1 | mlx5_9:1 | mlx5_10:1 | mlx5_11:1");
  const NearNics near = nics_near(host.root(), "0000:9D:00.0");  // in CUDA's capitals
  EXPECT_EQ(near.distance, PciDistance::kSameSwitch);
  EXPECT_EQ(near.numa_node, 1);
  EXPECT_EQ(describe(near), "mlx5_6:1 (behind one PCIe switch with the GPU)");
}

TEST(NearNics, TwoGpusBehindOneSwitchShareItsTwoCardsOut) {
  EXPECT_EQ(choices(PciTree("dgx_a100")),
            "mlx5_0:1 | mlx5_1:1 | mlx5_2:1 | mlx5_3:1 | mlx5_6:1 | mlx5_7:1 | mlx5_8:1 | mlx5_9:1");
}

TEST(NearNics, GpusOfGb200ShareTheFastCardsOfTheirNumaNode) {
  const PciTree host("gb200");
  EXPECT_EQ(choices(host), "mlx5_0:1 | mlx5_1:1 | mlx5_3:1 | mlx5_4:1");
  EXPECT_EQ(nics_near(host.root(), "0018:01:00.0").distance, PciDistance::kSameNode);
}

TEST(NearNics, GpusOfAVirtualMachineShareTheCardsOfTheirNumaNode) {
  EXPECT_EQ(choices(PciTree("azure_nd_h100_v5")),
            "mlx5_ib0:1 | mlx5_ib1:1 | mlx5_ib2:1 | mlx5_ib3:1 | mlx5_ib4:1 | mlx5_ib5:1 | mlx5_ib6:1 | mlx5_ib7:1");
}

TEST(NearNics, AGpuOfP5GetsItsFourEfaDevices) {
  const PciTree host("ec2_p5");
  EXPECT_EQ(nics_near(host.root(), "0000:64:00.0").nics,
            (Names{"rdmap96s0:1", "rdmap97s0:1", "rdmap98s0:1", "rdmap99s0:1"}));
  std::set<std::string> all;
  for (const std::string& gpu : gpus_of_host(host.root())) {
    for (const std::string& nic : nics_near(host.root(), gpu).nics) all.insert(nic);
  }
  EXPECT_EQ(all.size(), 32U);
}

TEST(NearNics, OneCardServesAllGpusOfAFlatMachineAndSeveralAreSharedOut) {
  PciTree host("");
  for (const char* gpu : {"04", "05", "06", "07"}) host.add(fmt::format("pci0000:00/0000:00:{}.0 -1 gpu", gpu));
  EXPECT_EQ(choices(host), " |  |  | ");
  host.add("pci0000:00/0000:00:08.0 -1 rdma roce0 200 Ethernet eth1");
  EXPECT_EQ(choices(host), "roce0:1 | roce0:1 | roce0:1 | roce0:1");
  EXPECT_EQ(nics_near(host.root(), "0000:00:04.0").distance, PciDistance::kSameRoot);
  host.add("pci0000:00/0000:00:09.0 -1 rdma roce1 200 Ethernet eth2");
  EXPECT_EQ(choices(host), "roce0:1 | roce1:1 | roce0:1 | roce1:1");
}

TEST(NearNics, ASlowCardForManagementIsNotChosenThoughItIsNearest) {
  PciTree host("");
  host.add("pci0000:00/0000:00:01.0/0000:01:00.0 0 gpu");
  host.add("pci0000:00/0000:00:01.0/0000:02:00.0 0 rdma slow0 100 Ethernet eth0");
  host.add("pci0000:40/0000:40:01.0/0000:41:00.0 0 rdma fast0 400 Ethernet eth1");
  EXPECT_EQ(choices(host), "fast0:1");
  EXPECT_EQ(choices(host, {"fast0", "slow0"}), "slow0:1") << "whoever names it wants it";
}

TEST(NearNics, ACardThatCantBeUsedIsLeftOut) {
  const PciTree host("dgx_h100");
  host.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
  std::filesystem::remove(host.root() / "dev/infiniband/uverbs_mlx5_3");  // the container has no access
  // Then the next nearest are those of the NUMA node, of which InfiniBand is preferred.
  const NearNics first = nics_near(host.root(), "0000:1b:00.0");
  EXPECT_EQ(first.distance, PciDistance::kSameNode);
  EXPECT_EQ(first.nics, Names{"mlx5_4:1"});
  EXPECT_EQ(nics_near(host.root(), "0000:43:00.0").nics, Names{"mlx5_5:1"});
}

TEST(NearNics, OnlyAllowedCardsAreChosenFrom) {
  const PciTree host("dgx_h100");
  EXPECT_EQ(choices(host, {"mlx5_0", "mlx5_6:1"}),
            "mlx5_0:1 | mlx5_0:1 | mlx5_0:1 | mlx5_0:1 | mlx5_6:1 | mlx5_6:1 | mlx5_6:1 | mlx5_6:1");
  EXPECT_EQ(nics_near(host.root(), "0000:1b:00.0", Names{"enp41s0f0np0"}).nics, Names{"enp41s0f0np0"});
  EXPECT_EQ(unknown_nics(host.root(), Names{"mlx5_0", "mlx5_6:1", "enp41s0f0np0", "mlx5_99"}), Names{"mlx5_99"});
}

TEST(NearNics, AGpuThatIsNotOnTheBusGetsNone) {
  const PciTree host("dgx_h100");
  for (const char* id : {"", "0000:ff:00.0", "../../../etc", "00000000:FF:00.0"}) {
    EXPECT_TRUE(nics_near(host.root(), id).nics.empty()) << id;
    EXPECT_EQ(numa_node_of(host.root(), id), -1) << id;
  }
  EXPECT_EQ(numa_node_of(host.root(), "00000000:DF:00.0"), 1);
  EXPECT_EQ(describe(nics_near(host.root(), "")), "no RDMA device");
  EXPECT_EQ(nics_near(host.root(), "0000:df:00.0", Names{"mlx5_99"}).numa_node, 1) << "without cards too";
}

}  // namespace
}  // namespace kvferry::net
