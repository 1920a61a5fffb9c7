"""The search over the rounds at which prefill stages happen."""
