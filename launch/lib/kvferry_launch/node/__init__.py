"""Starts one node of a deployment on the node's host: makes its command line, finds its HTTP address, guards its
processes.

The modules here import only the standard library, each other and `paths`, because launch/prefill, launch/decode and
launch/controller run outside .venv. `guard.py` imports only the standard library, because it runs as a script on any
host.
"""
