"""The search of execution configurations under a latency bound."""
