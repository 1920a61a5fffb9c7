"""EconoServe's scheduler, and the pipelined one of this project beside it."""
