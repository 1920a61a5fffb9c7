"""Fleets: replicas that share a job, simulated together."""
