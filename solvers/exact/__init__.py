"""Proven optima of small problems."""
