"""Run schedules: engines, the serving loop, profiling and reports."""
