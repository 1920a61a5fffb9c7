"""Mathematics of the problem: formulations, lower bounds, timing models."""
