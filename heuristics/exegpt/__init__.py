"""Policies that run an execution configuration of ExeGPT."""
