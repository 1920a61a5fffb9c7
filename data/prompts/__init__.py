"""Prompts in tables: Parquet, CSV, JSON lines and datasets."""
