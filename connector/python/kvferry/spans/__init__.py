"""Spans for OpenTelemetry, in the trace of vLLM's request."""
