"""Solver libraries behind one neutral linear model, each in a process of its own."""
