"""launch/proxy: one OpenAI URL in front of the servers of one namespace that a controller lists. In a checkout it runs
in .venv, because it needs aiohttp.

The proxy imports no other part of kvferry_launch.
"""
