"""Served jobs on the clock of iterations: replayed, fitted to their logs, audited in seconds."""
