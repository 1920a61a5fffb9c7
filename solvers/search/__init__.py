"""The one search for schedules: starts, annealing over stage times, exact enumeration."""
