#include "transport/base/kv_layout.h"

namespace kvferry {

Result<void> KvLayout::validate() const {
  const auto bad = [](std::string what) { return Error{ErrorCode::kInvalidArgument, std::move(what)}; };
  if (layers.empty()) return bad("KV layout has no layers");
  if (num_kv_heads == 0 || head_dim == 0 || element_bytes == 0 || block_tokens == 0 || num_blocks == 0)
    return bad(fmt::format("KV layout has a zero: heads {}, head_dim {}, element bytes {}, block tokens {}, blocks {}",
                           num_kv_heads, head_dim, element_bytes, block_tokens, num_blocks));
  if (planes != 1 && planes != 2)
    return bad(fmt::format("KV layout has {} planes; 1 (latent) or 2 (K, V) allowed", planes));
  for (const LayerLayout& layer : layers) {
    if (layer.key.base == 0 || (planes == 2 && layer.value.base == 0))
      return bad(fmt::format("KV layout of layer '{}' has no address", layer.name));
  }
  return {};
}

}  // namespace kvferry
