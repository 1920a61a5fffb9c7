"""Scheduling policies and dispatch rules: what to do next, given the state."""
