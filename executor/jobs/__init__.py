"""Jobs from a plan to its completions: journal, resume, watchdog."""
