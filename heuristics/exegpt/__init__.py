"""Policies that carry out an execution configuration of ExeGPT."""
