"""kvferry: moves KV cache between the vLLM servers of a disaggregated deployment."""

try:
    import kvferry._core  # noqa: F401
except ModuleNotFoundError:
    pass  # the native module is not built; modules that do not import it, such as kvferry.tickets, still work
except ImportError as error:
    from kvferry.native import why_not_loaded

    raise ImportError(why_not_loaded(error), name=error.name, path=error.path) from None


def __getattr__(name: str) -> str:
    if name == "__version__":
        from kvferry._core import version

        return str(version())
    raise AttributeError(name)
