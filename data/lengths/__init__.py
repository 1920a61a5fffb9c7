"""Lengths of prompts and completions: distributions and predictions."""
