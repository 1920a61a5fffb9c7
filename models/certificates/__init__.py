"""Independent checkers of bounds, which share no code with the proofs."""
