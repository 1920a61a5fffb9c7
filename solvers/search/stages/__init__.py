"""The search over the decode steps at which prefill stages happen."""
