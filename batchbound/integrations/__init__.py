"""Plans for other engines, imported on first use."""
