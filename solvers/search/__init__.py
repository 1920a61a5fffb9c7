"""Schedule search: baselines, and phases that improve on them."""
