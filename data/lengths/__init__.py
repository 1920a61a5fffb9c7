"""Lengths of prompts and completions: distributions, predictions and their errors."""
