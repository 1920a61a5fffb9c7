"""Engines in other processes: replicas, peers and workers."""
