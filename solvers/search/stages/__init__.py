"""Search over the times of prefill stages."""
