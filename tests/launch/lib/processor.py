"""What this processor's vector units can do, on which it depends what vLLM serves."""


def has_fp8_kernels() -> bool:
    """Returns whether vLLM's CPU attention has kernels for an fp8 KV cache here: they need AVX-512 or AMX."""
    import torch  # Quick runs, which install no vLLM, load this module as well.

    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())
