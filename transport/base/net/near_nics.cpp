#include "transport/base/net/near_nics.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "transport/base/net/sysfs.h"

namespace kvferry::net {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kNvidia = "0x10de";
// The first digits of the PCI classes of GPUs: with and without a connector for a display.
constexpr std::string_view kGpuClasses[] = {"0x0300", "0x0302"};

fs::path pci_folder(const fs::path& root, std::string_view pci_bus_id) {
  return root / "sys/bus/pci/devices" / pci_bus_id;
}

/// Returns a PCI address as sysfs writes it: CUDA writes capitals, and nvidia-smi eight digits of the domain.
std::string in_sysfs_form(std::string_view pci_bus_id) {
  std::string id(pci_bus_id);
  std::ranges::transform(id, id.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  while (id.find(':') > 4 && id.find(':') != std::string::npos && id.front() == '0') id.erase(0, 1);
  return id;
}

/// A device's place in the tree of PCI devices.
struct Place {
  std::vector<std::string> path;  // folders from the top; empty: the device is not on a PCI bus
  std::size_t root_at = 0;        // index of the root complex in `path`
  int numa_node = -1;
};

Place place_of(const fs::path& device) {
  std::error_code failure;
  const fs::path full = fs::canonical(device, failure);
  if (failure) return {};
  Place place;
  bool has_root = false;
  for (const fs::path& part : full) {
    place.path.push_back(part.string());
    if (part.string().starts_with("pci") && part.string().find(':') != std::string::npos) {
      place.root_at = place.path.size() - 1;
      has_root = true;
    }
  }
  if (!has_root) return {};
  const std::string node = first_line(full / "numa_node");
  place.numa_node = node.empty() ? -1 : std::atoi(node.c_str());
  return place;
}

/// How far two devices are from each other; for two below the same switch, also how many steps in the tree are between
/// them.
struct Separation {
  PciDistance distance = PciDistance::kFar;
  std::size_t num_hops = 0;
  auto operator<=>(const Separation&) const = default;
};

Separation separation(const Place& a, const Place& b) {
  if (a.path.empty() || b.path.empty()) return {};
  const auto [in_a, in_b] = std::ranges::mismatch(a.path, b.path);
  const auto num_common = static_cast<std::size_t>(in_a - a.path.begin());
  if (num_common > a.root_at + 1) return {PciDistance::kSameSwitch, a.path.size() + b.path.size() - 2 * num_common};
  if (num_common == a.root_at + 1) return {PciDistance::kSameRoot};
  return {a.numa_node >= 0 && a.numa_node == b.numa_node ? PciDistance::kSameNode : PciDistance::kFar};
}

struct Nic {
  std::string name;  // name of the device, as UCX writes it
  Place place;
  double gigabits = 0;
  bool is_infiniband = false;
  std::string order;  // sort key: the place on the PCI bus, then the name
};

bool is_named(std::span<const std::string> names, const std::string& device, const std::string& with_port) {
  return std::ranges::any_of(names, [&](const std::string& name) { return name == device || name == with_port; });
}

/// Returns false if the file through which programs use the RDMA device is missing here, as in many containers; true if
/// the kernel names no such file.
bool can_be_opened(const fs::path& root, const fs::path& device) {
  const std::vector<std::string> files = entries(device / "device/infiniband_verbs");
  std::error_code ignored;
  return files.empty() || std::ranges::any_of(files, [&](const std::string& file) {
           return fs::exists(root / "dev/infiniband" / file, ignored);
         });
}

void add_rdma_devices(const fs::path& root, std::span<const std::string> allowed, std::vector<Nic>& nics) {
  for (const std::string& device : entries(root / "sys/class/infiniband")) {
    const fs::path folder = root / "sys/class/infiniband" / device;
    if (!can_be_opened(root, folder)) continue;
    const Place place = place_of(folder / "device");
    for (const std::string& port : entries(folder / "ports")) {
      const std::string name = fmt::format("{}:{}", device, port);
      if (!allowed.empty() && !is_named(allowed, device, name)) continue;
      if (first_line(folder / "ports" / port / "state").find("ACTIVE") == std::string::npos) continue;
      const double gigabits = std::atof(first_line(folder / "ports" / port / "rate").c_str());
      const bool is_infiniband = first_line(folder / "ports" / port / "link_layer") == "InfiniBand";
      const std::string on_bus = place.path.empty() ? "" : place.path.back();
      nics.push_back({name, place, gigabits, is_infiniband, fmt::format("{} {}", on_bus, name)});
    }
  }
}

void add_interfaces(const fs::path& root, std::span<const std::string> allowed, std::vector<Nic>& nics) {
  for (const std::string& name : entries(root / "sys/class/net")) {
    if (!is_named(allowed, name, name)) continue;
    const Place place = place_of(root / "sys/class/net" / name / "device");
    nics.push_back({name, place, 0, false, fmt::format("{} {}", place.path.empty() ? "" : place.path.back(), name)});
  }
}

std::vector<Nic> candidates(const fs::path& root, std::span<const std::string> allowed) {
  std::vector<Nic> nics;
  add_rdma_devices(root, allowed, nics);
  add_interfaces(root, allowed, nics);
  std::ranges::sort(nics, {}, &Nic::order);
  if (!allowed.empty() || nics.empty()) return nics;
  const double fastest = std::ranges::max(nics, {}, &Nic::gigabits).gigabits;
  std::erase_if(nics, [&](const Nic& nic) { return 2 * nic.gigabits < fastest; });
  return nics;
}

/// Returns the best of the nearest cards, and how near they are.
std::pair<std::vector<Nic>, PciDistance> nearest(const Place& gpu, const std::vector<Nic>& nics) {
  if (nics.empty()) return {};
  const auto rank = [&](const Nic& nic) {
    return std::tuple(separation(gpu, nic.place), -nic.gigabits, !nic.is_infiniband);
  };
  const auto best = rank(*std::ranges::min_element(nics, {}, rank));
  std::vector<Nic> found;
  std::ranges::copy_if(nics, std::back_inserter(found), [&](const Nic& nic) { return rank(nic) == best; });
  return {std::move(found), std::get<0>(best).distance};
}

/// Divides `nics` among `num_takers` GPUs and returns the part of GPU number `taker`. If there are fewer cards than
/// GPUs, the part is one card, which other GPUs may get too.
std::span<const Nic> share(std::span<const Nic> nics, std::size_t taker, std::size_t num_takers) {
  if (nics.empty()) return nics;
  if (nics.size() < num_takers) return nics.subspan(taker % nics.size(), 1);
  const std::size_t first = taker * nics.size() / num_takers;
  return nics.subspan(first, (taker + 1) * nics.size() / num_takers - first);
}

}  // namespace

std::vector<std::string> gpus_of_host(const fs::path& root) {
  std::vector<std::string> gpus = entries(root / "sys/bus/pci/devices");
  std::erase_if(gpus, [&](const std::string& id) {
    const std::string kind = first_line(pci_folder(root, id) / "class");
    return first_line(pci_folder(root, id) / "vendor") != kNvidia ||
           std::ranges::none_of(kGpuClasses, [&](std::string_view gpu) { return kind.starts_with(gpu); });
  });
  return gpus;
}

int numa_node_of(const fs::path& root, std::string_view pci_bus_id) {
  return place_of(pci_folder(root, in_sysfs_form(pci_bus_id))).numa_node;
}

NearNics nics_near(const fs::path& root, std::string_view pci_bus_id, std::span<const std::string> allowed) {
  const std::string gpu = in_sysfs_form(pci_bus_id);
  const Place place = place_of(pci_folder(root, gpu));
  if (gpu.empty() || place.path.empty()) return {};
  const std::vector<Nic> nics = candidates(root, allowed);
  const auto [near, distance] = nearest(place, nics);
  const auto names = [](std::span<const Nic> some) {
    std::vector<std::string> all;
    for (const Nic& nic : some) all.push_back(nic.name);
    return all;
  };
  std::size_t taker = 0, num_takers = 1;
  for (const std::string& other : gpus_of_host(root)) {
    if (other == gpu || names(nearest(place_of(pci_folder(root, other)), nics).first) != names(near)) continue;
    ++num_takers;
    if (other < gpu) ++taker;
  }
  return {names(share(near, taker, num_takers)), distance, place.numa_node};
}

std::vector<std::string> unknown_nics(const fs::path& root, std::span<const std::string> names) {
  std::vector<std::string> unknown;
  std::ranges::copy_if(names, std::back_inserter(unknown), [&](const std::string& name) {
    std::error_code ignored;
    return !fs::exists(root / "sys/class/infiniband" / name.substr(0, name.find(':')), ignored) &&
           !fs::exists(root / "sys/class/net" / name, ignored);
  });
  return unknown;
}

std::string describe(const NearNics& near) {
  if (near.nics.empty()) return "no RDMA device";
  constexpr std::string_view kWhere[] = {"behind one PCIe switch with the GPU", "at the GPU's root complex",
                                         "on the GPU's NUMA node", "not near the GPU"};
  return fmt::format("{} ({})", fmt::join(near.nics, ", "), kWhere[static_cast<std::size_t>(near.distance)]);
}

}  // namespace kvferry::net
