"""Measuring a model on this machine, and how far simulation is from a measured run."""
