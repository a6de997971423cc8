"""kvferry: moves KV cache between the vLLM servers of a disaggregated deployment."""

__version__ = "0.1.0"
