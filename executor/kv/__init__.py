"""KV cache of a running batch: layouts and captured decode steps."""
