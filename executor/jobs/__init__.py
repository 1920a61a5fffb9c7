"""A job from its plan to its completions: journal, resume, watchdog."""
