// A folder with /sys and /dev of a host, made from a text of tests/transport/base/net/topologies.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace kvferry {

class PciTree {
 public:
  /// `topology`: the name of the text without its extension; empty: a host without devices.
  explicit PciTree(const std::string& topology) {
    std::string name = (std::filesystem::temp_directory_path() / "kvferry-pci-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    if (topology.empty()) return;
    std::ifstream text(std::filesystem::path(KVFERRY_TOPOLOGIES) / (topology + ".txt"));
    for (std::string line; std::getline(text, line);)
      if (!line.starts_with('#')) add(line);
  }
  PciTree(const PciTree&) = delete;
  PciTree& operator=(const PciTree&) = delete;
  ~PciTree() { std::filesystem::remove_all(root_); }

  const std::filesystem::path& root() const { return root_; }

  /// Adds the PCI function that a line describes.
  void add(const std::string& line) {
    std::istringstream words(line);
    std::string path, node, kind;
    words >> path >> node >> kind;
    const std::filesystem::path device = std::filesystem::path("sys/devices") / path;
    write(device / "numa_node", node);
    link(std::filesystem::path("sys/bus/pci/devices") / device.filename(), device);
    if (kind == "gpu") write_kind(device, "0x030200", "0x10de");
    if (kind == "other") {
      std::string class_number, vendor;
      words >> class_number >> vendor;
      write_kind(device, class_number, vendor);
    }
    if (kind != "rdma") return;
    write_kind(device, "0x020700", "0x15b3");
    std::string rdma, rate, link_layer, interface;
    words >> rdma >> rate >> link_layer >> interface;
    write(device / "infiniband" / rdma / "ports/1/state", "4: ACTIVE");
    write(device / "infiniband" / rdma / "ports/1/rate", rate + " Gb/sec (4X)");
    write(device / "infiniband" / rdma / "ports/1/link_layer", link_layer);
    write(device / "infiniband_verbs" / ("uverbs_" + rdma) / "ibdev", rdma);
    write(std::filesystem::path("dev/infiniband") / ("uverbs_" + rdma), "");
    link(device / "infiniband" / rdma / "device", device);
    link(std::filesystem::path("sys/class/infiniband") / rdma, device / "infiniband" / rdma);
    if (interface.empty()) return;
    write(device / "net" / interface / "operstate", "up");
    link(device / "net" / interface / "device", device);
    link(std::filesystem::path("sys/class/net") / interface, device / "net" / interface);
  }

  /// Writes a file below root().
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << '\n';
  }

 private:
  void write_kind(const std::filesystem::path& device, const std::string& class_number, const std::string& vendor) {
    write(device / "class", class_number);
    write(device / "vendor", vendor);
  }
  void link(const std::filesystem::path& from, const std::filesystem::path& to) const {
    std::filesystem::create_directories((root_ / from).parent_path());
    std::filesystem::create_directory_symlink(root_ / to, root_ / from);
  }

  std::filesystem::path root_;
};

}  // namespace kvferry
