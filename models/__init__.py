"""The mathematics: formulations, lower bounds, timing models."""
