"""Readers of batch files, tables, traces and profiles, and generators of workloads."""
