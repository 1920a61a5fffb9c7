"""Scheduling policies and dispatch rules."""
