"""Engines, jobs on disk, profiling and reports."""
