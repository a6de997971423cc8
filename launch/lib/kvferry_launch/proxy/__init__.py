"""launch/proxy: one OpenAI URL in front of all servers that a controller knows. Runs in .venv (aiohttp).

It imports no other part of kvferry_launch.
"""
