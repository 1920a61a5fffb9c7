"""Lower bounds on the makespan, with the terms that prove them."""
