"""Runs vLLM's real Scheduler and the real KvFerryConnector with a model runner that writes stamps instead of KV."""
