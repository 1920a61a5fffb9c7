"""From a problem to a plan: for known lengths, predicted lengths, and fleets."""
