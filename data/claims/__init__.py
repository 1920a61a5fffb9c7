"""Claims on engines of others, and their assumptions."""
