"""Servers, clients, prompts and comparison of tokens for the quickstart, the benchmarks and the tests. Runs in .venv.

Its modules may import `setup`, `node`, `proxy` and the package's top level; no other sub-package imports them.
"""
