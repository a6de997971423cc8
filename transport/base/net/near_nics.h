// Which network cards are near a GPU, by the tree of PCI devices that Linux shows in /sys.
#pragma once

#include <compare>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::net {

/// How far apart two PCI devices are, the nearest first.
enum class PciDistance : std::uint8_t {
  kSameSwitch,  // both are below one PCIe switch or root port
  kSameRoot,    // both are below one PCIe root complex
  kSameNode,    // both are at one NUMA node
  kFar,         // their NUMA nodes differ or are unknown
};

/// The network cards that nics_near() chose for one GPU.
struct NearNics {
  std::vector<std::string> nics;  // as UCX writes them: DEVICE:PORT of an RDMA device, or the name of an interface
  PciDistance distance = PciDistance::kFar;
  int numa_node = -1;  // NUMA node of the GPU; -1: unknown
};

/// Returns the PCI addresses of this host's NVIDIA GPUs, sorted, such as "0000:1b:00.0". `root`: the folder that
/// contains /sys and /dev.
std::vector<std::string> gpus_of_host(const std::filesystem::path& root);

/// Returns the NUMA node of a PCI device, -1 if it is unknown.
int numa_node_of(const std::filesystem::path& root, std::string_view pci_bus_id);

/// Returns the network cards that are nearest to a GPU. GPUs with the same nearest cards divide these among them, or
/// get one card each if there are fewer cards than GPUs, in the order of the PCI addresses, so that every process
/// comes to the same result by itself. Never chosen are inactive ports, devices that have no file in this container's
/// /dev, and, without `allowed`, ports with less than half the rate of the fastest port, which are for management. Of
/// equally near ports the fastest are chosen, and of these InfiniBand rather than Ethernet. Returns no cards if the GPU
/// is missing, or if there is no card to choose from.
///
/// `allowed`: names of RDMA devices, with or without a port, and of interfaces; only these are chosen from. Empty: all
/// RDMA devices.
NearNics nics_near(const std::filesystem::path& root, std::string_view pci_bus_id,
                   std::span<const std::string> allowed = {});

/// Returns the names that this host has neither as an RDMA device nor as an interface.
std::vector<std::string> unknown_nics(const std::filesystem::path& root, std::span<const std::string> names);

/// Returns for example "mlx5_0:1 (behind one PCIe switch with the GPU)", or "no RDMA device".
std::string describe(const NearNics& near);

}  // namespace kvferry::net
