"""One process of a deployment, on the host where it runs: its command line, its HTTP address, its guard.

Imports only the standard library and `paths`, because launch/prefill, launch/decode and launch/controller run outside
.venv. `guard.py` imports only the standard library, because it runs as a script on any host.
"""
