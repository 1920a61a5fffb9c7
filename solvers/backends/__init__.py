"""Solver libraries behind one linear model, each in its own process."""
