// PCI address and UUID, by which other programs know a CUDA GPU. Private to this folder.
#pragma once

#include <cuda_runtime.h>
#include <fmt/format.h>

#include <string>
#include <string_view>

namespace kvferry {

/// Returns the GPU's PCI address as /sys writes it, such as "0000:1b:00.0".
inline std::string cuda_pci_bus_id(const cudaDeviceProp& properties) {
  return fmt::format("{:04x}:{:02x}:{:02x}.0", properties.pciDomainID, properties.pciBusID, properties.pciDeviceID);
}

/// Returns the UUID as NVIDIA's tools write it. CUDA gives a MIG instance a UUID of its own, and a name with "MIG".
inline std::string cuda_uuid(const cudaDeviceProp& properties) {
  const bool is_mig = std::string_view(properties.name).find(" MIG ") != std::string_view::npos;
  std::string text = is_mig ? "MIG" : "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(properties.uuid.bytes[i]));
  }
  return text;
}

}  // namespace kvferry
