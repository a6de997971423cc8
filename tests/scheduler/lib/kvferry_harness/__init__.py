"""vLLM's real Scheduler and the real KvFerryConnector around a model runner that writes stamps instead of KV."""
