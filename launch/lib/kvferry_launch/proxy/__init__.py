"""The front door: each request to the best pair of servers, and decode is chosen before prefill begins."""
