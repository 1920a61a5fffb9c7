"""Cost of an engine iteration: from a table of operations, and from below as a sum of counts."""
