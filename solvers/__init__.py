"""What finds schedules: backends, exact and anytime solvers, configuration search."""
