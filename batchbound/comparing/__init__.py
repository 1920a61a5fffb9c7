"""Solvers side by side on the same instances."""
