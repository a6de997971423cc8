// Packs the chunks of a rank whose layers in GPU memory have several shapes.
#pragma once

#include <memory>
#include <span>

#include "kernels/stream_packer.h"

namespace kvferry {

/// Makes a packer for the layers of all layouts. A chunk has the bytes of each layout, one after the other, and its
/// checksum covers all of them. For one layout it is gpu.make_packer()'s packer, which may hash while it copies. For
/// several layouts, each pass copies one layout after the other and then reads the whole chunks once more to hash them.
/// `formats`: [layout]; empty: ChunkFormat{} for all layouts. Errors: those of gpu.make_packer(), and kInvalidArgument
/// if there is no layout, or if there are formats, but not one for each layout.
Result<std::unique_ptr<StreamPacker>> make_joined_packer(const Gpu& gpu, std::span<const KvLayout> layouts,
                                                         std::span<const ChunkFormat> formats);

}  // namespace kvferry
