"""Servers, clients, prompts and comparison of tokens for the quickstart, the benchmarks and the tests. These modules
run in .venv, except for quickstart.py until the set-up has ended.

The modules here may import `setup`, `node`, `proxy` and the top-level modules. No other sub-package imports testbed.
"""
