"""kvferry: moves KV cache between the vLLM servers of a disaggregated deployment."""


def __getattr__(name: str) -> str:
    if name == "__version__":
        from kvferry._core import version

        return str(version())
    raise AttributeError(name)
