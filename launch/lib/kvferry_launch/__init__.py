"""What launch/ and tests/vllm share: set-up, toy models, servers, clients and the comparison of tokens."""
