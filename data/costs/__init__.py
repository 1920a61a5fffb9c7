"""What stages cost: cost models, iteration costs, layer profiles and what they were fitted to."""
