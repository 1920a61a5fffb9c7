"""Files on disk, with bounded reading, atomic writing and precise errors."""
