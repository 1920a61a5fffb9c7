"""Lower bounds on the makespan, with their proofs."""
