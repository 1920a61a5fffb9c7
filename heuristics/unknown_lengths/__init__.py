"""Policies for groups of completions of unknown lengths."""
