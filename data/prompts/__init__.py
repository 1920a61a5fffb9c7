"""Prompts in tables: Parquet, CSV, JSON lines and folders of Hugging Face datasets."""
