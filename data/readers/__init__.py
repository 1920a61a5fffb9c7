"""Readers of batch files, tables, traces and profiles."""
