#include "launch/bench/transfer/model_shape.h"

#include <fmt/ranges.h>

#include <vector>

#include "launch/bench/harness/flags.h"

namespace kvferry::bench {
namespace {

// Values of each model's config.json: num_hidden_layers, num_key_value_heads, head_dim. With MLA: num_hidden_layers, 0,
// kv_lora_rank + qk_rope_head_dim.
constexpr ModelShape kModels[] = {
    {"llama-3.1-8b", 32, 8, 128},
    {"llama-3.1-70b", 80, 8, 128},
    {"qwen3-32b", 64, 8, 128},
    {"deepseek-v3", 61, 0, 512 + 64},
};

}  // namespace

Result<ModelShape> find_model(std::string_view name) {
  std::vector<std::string_view> names;
  for (const ModelShape& model : kModels) {
    if (model.name == name) return model;
    names.push_back(model.name);
  }
  return bad_flag("--model", name, fmt::format("{}", fmt::join(names, ", ")));
}

Result<ModelBlocks> blocks_of(const ModelShape& model, std::string_view dtype, std::uint64_t tokens, std::uint64_t tp) {
  const std::uint64_t element_bytes = dtype == "bf16" ? 2 : dtype == "fp8" ? 1 : 0;
  if (element_bytes == 0) return bad_flag("--dtype", dtype, "bf16, fp8");
  if (tokens == 0 || tokens > kTokensMax)
    return bad_flag("--tokens", std::to_string(tokens), fmt::format("a whole number from 1 to {}", kTokensMax));
  const bool is_mla = model.kv_heads == 0;
  if (tp == 0 || (!is_mla && model.kv_heads % tp != 0))
    return bad_flag("--tp", std::to_string(tp),
                    fmt::format("a divisor of the {} KV heads of {}", model.kv_heads, model.name));
  const std::uint64_t heads = is_mla ? 1 : model.kv_heads / tp;
  const std::uint64_t parts = is_mla ? 1 : 2;
  const std::uint64_t block_bytes = kBlockTokens * heads * model.head_size * element_bytes;
  const std::uint64_t token_blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  const std::uint64_t num_blocks = token_blocks * model.layers * parts;
  const std::string per_token = is_mla ? fmt::format("latent of {} x {} B", model.head_size, element_bytes)
                                       : fmt::format("{} KV heads x {} x {} B", heads, model.head_size, element_bytes);
  return ModelBlocks{
      block_bytes, num_blocks,
      fmt::format(
          "{} {}, one of {} ranks: {} tokens x {} = {} a block; {} tokens = {} blocks x {} layers{} = {} blocks, "
          "{:.1f} MiB",
          model.name, dtype, tp, kBlockTokens, per_token, byte_size_text(block_bytes), tokens, token_blocks,
          model.layers, is_mla ? "" : " x K and V", num_blocks,
          static_cast<double>(num_blocks * block_bytes) / (1 << 20))};
}

}  // namespace kvferry::bench
