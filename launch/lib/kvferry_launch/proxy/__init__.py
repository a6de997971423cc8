"""launch/proxy: one OpenAI URL in front of all servers that a controller knows. Runs in .venv (aiohttp).

The proxy imports no other part of kvferry_launch.
"""
