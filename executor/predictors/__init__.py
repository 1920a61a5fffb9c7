"""Predictors of completion lengths."""
