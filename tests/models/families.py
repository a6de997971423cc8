"""The model families of the table, each as a toy of a few layers whose weights are generated, not loaded."""

from dataclasses import dataclass, field
from typing import Any

BLOCK = 32  # tokens in a block, unless a feature has blocks of another size
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 128, 4, 4, 2, 32, 512
WINDOW = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": VOCAB - 1, "pad_token_id": 0,
    "tie_word_embeddings": False}
ATTENTION = SHAPE | {"num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_n_groups": 1}
IMAGE_SIDE, IMAGE_TOKENS = 80, 100
ENCODER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
KEYS_AND_VALUES = {"k_proj": KV_HEADS * HEAD_SIZE, "v_proj": KV_HEADS * HEAD_SIZE}


@dataclass(frozen=True)
class Family:
    """A model's config.json and what its features need.

    flags: vLLM's arguments for each of its engines. few_blocks: so few that vLLM must preempt. adapter: the number of
    outputs of each layer that the LoRA adapter changes, and adapter_layers: the names of the modules that have them.
    keeps_state: True if a chunk is one block of vLLM. blocks_in_one: how many of vLLM's blocks are as long as a block
    of the KV group with the longest blocks. has_images: True if each long prompt has an image (engine.py).
    """

    config: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    few_blocks: int = 22
    few_blocks_with_drafts: int = 0
    adapter: dict[str, int] = field(default_factory=lambda: KEYS_AND_VALUES)
    adapter_layers: str = "model.layers.{}.self_attn"
    keeps_state: bool = False
    blocks_in_one: int = 1
    has_images: bool = False


def model(architecture: str, kind: str, shape: dict[str, Any] = ATTENTION, **changes: Any) -> dict[str, Any]:
    return shape | {"architectures": [architecture], "model_type": kind} | changes


KEPT_STATES = {"enable_prefix_caching": True, "max_num_seqs": 16}
# On CPUs, vLLM's Mamba-2 stops if a step computes several blocks of a prompt, so a step has one block of tokens. With
# --long-prefill-token-threshold it would compute more while there is only one request.
def one_block_steps(block: int) -> dict[str, Any]:
    return KEPT_STATES | {"block_size": block, "max_num_batched_tokens": block}


FAMILIES: dict[str, Family] = {
    "llama": Family(model("LlamaForCausalLM", "llama")),
    "qwen2": Family(model("Qwen2ForCausalLM", "qwen2")),
    "qwen3": Family(model("Qwen3ForCausalLM", "qwen3")),
    "mistral-window": Family(model("MistralForCausalLM", "mistral", sliding_window=WINDOW), few_blocks=20),
    "gemma2-window": Family(model("Gemma2ForCausalLM", "gemma2", query_pre_attn_scalar=HEAD_SIZE, **ALTERNATING),
                              few_blocks=36),
    "gemma3-window": Family(model("Gemma3ForCausalLM", "gemma3_text", query_pre_attn_scalar=HEAD_SIZE,
                                    **ALTERNATING), few_blocks=36),
    "pangu-two-windows": Family(
        model("PanguEmbeddedForCausalLM", "llama", interleaved_sliding_window=[WINDOW, None, 160, None]),
        {"num_gpu_blocks_override": 384}, few_blocks=72),
    # the last two layers use the KV of the first two layers
    "gemma3n": Family(
        model("Gemma3nForCausalLM", "gemma3n_text", hidden_size_per_layer_input=32, vocab_size_per_layer_input=VOCAB,
              num_kv_shared_layers=2, altup_num_inputs=2, laurel_rank=16, intermediate_size=[256] * LAYERS,
              activation_sparsity_pattern=[0.0] * LAYERS, **ALTERNATING),
        few_blocks=36, adapter_layers="model.language_model.layers.{}.self_attn"),
    "phi3": Family(model("Phi3ForCausalLM", "phi3"),
                   adapter={"qkv_proj": (HEADS + 2 * KV_HEADS) * HEAD_SIZE}),
    "gpt2": Family(model("GPT2LMHeadModel", "gpt2", SHAPE, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
                         n_positions=4096, activation_function="gelu_new"), adapter_layers="transformer.h.{}.attn",
                   adapter={"c_attn": 3 * HIDDEN}),
    # Without yarn, as real models have it, vLLM's rotary embedding for CPUs takes 3-d queries by wrong strides, and a
    # token's KV depends on its place in the step.
    "deepseek-v2": Family(
        model("DeepseekV2ForCausalLM", "deepseek_v2", SHAPE, num_key_value_heads=HEADS, kv_lora_rank=512,
              q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, n_routed_experts=4,
              n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=LAYERS,
              rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
                               "original_max_position_embeddings": 1024, "mscale": 1.0, "mscale_all_dim": 1.0}),
        few_blocks=44, adapter={"kv_a_proj_with_mqa": 512 + 64}),  # vLLM's blocks are of 16 tokens here
    # LLaVA, Qwen2-VL and most others need torchvision, of which PyPI has no CPU build
    "blip2": Family(
        {"architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "torch_dtype": "float32",
         "text_config": model("LlamaForCausalLM", "llama", vocab_size=VOCAB + 64), "num_query_tokens": IMAGE_TOKENS,
         "image_token_index": VOCAB, "qformer_config": ENCODER | {"encoder_hidden_size": 64, "vocab_size": 64,
                                                                  "cross_attention_frequency": 1},
         "vision_config": ENCODER | {"image_size": IMAGE_SIDE, "patch_size": 16}},
        adapter_layers="language_model.model.layers.{}.self_attn", has_images=True),
    "mamba2": Family(model("Mamba2ForCausalLM", "mamba2", {key: value for key, value in SHAPE.items()
                                                           if key != "num_attention_heads"},
                           state_size=16, num_heads=4, head_dim=64, expand=2, n_groups=2, chunk_size=16,
                           conv_kernel=4), one_block_steps(BLOCK), few_blocks=8, keeps_state=True),
    "granite-hybrid": Family(
        model("GraniteMoeHybridForCausalLM", "granitemoehybrid", SHAPE | MAMBA2, num_key_value_heads=KV_HEADS,
              num_local_experts=0, shared_intermediate_size=256, layer_types=["mamba", "attention"] * 2,
              position_embedding_type="nope"),
        one_block_steps(2 * BLOCK), few_blocks=20, keeps_state=True),
    "falcon-h1": Family(
        model("FalconH1ForCausalLM", "falcon_h1", ATTENTION | MAMBA2, mamba_d_ssm=256, mamba_d_conv=4,
              mamba_expand=2), one_block_steps(2 * BLOCK), few_blocks=28,
        keeps_state=True),
    "lfm2": Family(
        model("Lfm2ForCausalLM", "lfm2", ATTENTION, norm_eps=1e-5, conv_L_cache=3, conv_bias=False, conv_dim=HIDDEN,
              conv_dim_out=HIDDEN, block_dim=HIDDEN, block_ff_dim=256, block_multiple_of=32,
              block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
              layer_types=["full_attention", "conv", "conv", "full_attention"]), KEPT_STATES, keeps_state=True),
    "llama4": Family(model("Llama4ForCausalLM", "llama4_text", attention_chunk_size=64, num_local_experts=4,
                           num_experts_per_tok=1, interleave_moe_layer_step=1, intermediate_size_mlp=256,
                           no_rope_layers=[1, 0, 1, 0]), few_blocks=36),
    # heads of 64 elements are the smallest that vLLM's gated delta nets for CPUs have, and bfloat16 is their only type
    "qwen3-next": Family(
        model("Qwen3NextForCausalLM", "qwen3_next", head_dim=64, num_key_value_heads=4, linear_conv_kernel_dim=4,
              linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2,
              layer_types=["linear_attention"] * 3 + ["full_attention"], decoder_sparse_step=1, mlp_only_layers=[],
              shared_expert_intermediate_size=64, **EXPERTS), KEPT_STATES | {"dtype": "bfloat16"},
        few_blocks=26, keeps_state=True),
    "jamba": Family(
        model("JambaForCausalLM", "jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
              expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4,
              mamba_expand=2, mamba_dt_rank=8), KEPT_STATES, keeps_state=True),
    "nemotron-h": Family(
        model("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M*M*", mamba_num_heads=4,
              mamba_head_dim=64, ssm_state_size=16, n_groups=2, conv_kernel=4, chunk_size=16, mlp_hidden_act="relu2",
              layer_norm_epsilon=1e-5), one_block_steps(2 * BLOCK), few_blocks=28,
        adapter_layers="backbone.layers.{}.mixer", keeps_state=True),
    "mimo-v2": Family(
        model("MiMoV2FlashForCausalLM", "mimo_v2_flash", hybrid_layer_pattern=[0, 1, 0, 1], sliding_window=96,
              sliding_window_size=96, v_head_dim=32, swa_head_dim=32, swa_v_head_dim=32, swa_num_attention_heads=4,
              swa_num_key_value_heads=1, layernorm_epsilon=1e-5, moe_layer_freq=[0] * 4, n_routed_experts=4,
              num_experts_per_tok=2, moe_intermediate_size=64, partial_rotary_factor=0.5, n_group=1, topk_group=1,
              norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc", attention_bias=False,
              add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, swa_rope_theta=1e4,
              rope_theta=1e4), few_blocks=36, blocks_in_one=2),
    "gemma4": Family(model("Gemma4ForCausalLM", "gemma4_text", global_head_dim=64, num_global_key_value_heads=1,
                           hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0,
                           **ALTERNATING), few_blocks=36, blocks_in_one=2),
}
