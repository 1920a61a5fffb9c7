"""Servers with a prefix cache: simulation over a tree of prompts, and orders for it."""
