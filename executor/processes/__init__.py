"""Engines in other processes: Ray replicas, tensor parallel peers, encode and decode workers."""
