// The plain loop, element by element, which defines the result of all packers.
#pragma once

#include <memory>

#include "kernels/packer.h"

namespace kvferry {

Result<std::unique_ptr<Packer>> make_reference_packer(KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
