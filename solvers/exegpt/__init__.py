"""Search for execution configurations under a latency bound."""
