"""Runs of plans: loading, identity, serving, outputs."""
