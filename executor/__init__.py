"""What carries schedules out: engines, the loop, profiling, reports."""
