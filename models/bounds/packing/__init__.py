"""Makespan bin packing over machines: patterns, local search, proof."""
