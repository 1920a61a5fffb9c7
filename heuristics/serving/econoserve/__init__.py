"""EconoServe's scheduler, as its paper prints it."""
