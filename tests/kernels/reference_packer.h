// The plain loop over all elements. It defines the result that every packer must have.
#pragma once

#include <memory>

#include "kernels/packer.h"

namespace kvferry {

Result<std::unique_ptr<Packer>> make_reference_packer(KvLayout layout, ChunkFormat format = {});

}  // namespace kvferry
