"""The KV cache of a running batch: layouts, attention, captured decode steps."""
