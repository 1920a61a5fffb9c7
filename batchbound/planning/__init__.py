"""Plans of problems: known lengths, predicted lengths and fleets."""
