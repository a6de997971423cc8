"""One process of a deployment on its own host: its command line, its HTTP address, its guard.

Standard library only, because launch/prefill, launch/decode and launch/controller run outside .venv. The package may
import `paths`; `guard.py` imports nothing of this package, because it runs as a script on any host.
"""
