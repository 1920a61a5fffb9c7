"""Claims about other engines, and their assumptions."""
