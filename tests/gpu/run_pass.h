// Runs a pass of a packer from its start to its end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/stream_packer.h"

namespace kvferry {

/// Submits the jobs for all layers, some layers at a time, and waits for the result.
inline Result<std::vector<std::uint64_t>> run_pass(Result<std::unique_ptr<StreamPacker::Pass>> pass,
                                                   std::uint32_t num_layers, std::uint32_t layers_at_once) {
  if (!pass) return std::move(pass).error();
  for (std::uint32_t first = 0; first < num_layers; first += layers_at_once)
    if (Result<void> ok = (*pass)->copy_layers(first, std::min(first + layers_at_once, num_layers)); !ok)
      return std::move(ok).error();
  if (Result<void> ok = (*pass)->finish(); !ok) return std::move(ok).error();
  return (*pass)->wait();
}

}  // namespace kvferry
