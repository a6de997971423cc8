"""launch/proxy: one OpenAI URL in front of all servers that a controller knows. In a checkout it runs in .venv, because
it needs aiohttp.

The proxy imports no other part of kvferry_launch.
"""
