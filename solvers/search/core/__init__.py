"""Compiled searches and their callers."""
