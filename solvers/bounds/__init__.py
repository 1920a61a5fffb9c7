"""What searches for the strongest bound in the time it is given."""
