"""The independent checker: derives again what a bound claims, and shares no code with what proved it."""
