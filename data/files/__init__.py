"""Files on disk: read with bounds, written whole, mistakes named."""
