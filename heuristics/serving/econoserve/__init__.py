"""EconoServe's scheduler, as printed in its paper."""
