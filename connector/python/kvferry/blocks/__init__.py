"""Chunks of whole blocks, for KV whose tokens can't be told apart within a block."""
