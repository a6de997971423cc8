"""launch/proxy: one OpenAI URL in front of all servers that a controller knows. Runs in .venv (aiohttp).

It may import nothing else of this package.
"""
