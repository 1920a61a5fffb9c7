"""Policies that decide iteration by iteration, over KV blocks, and their simulation."""
