"""Rollouts of unknown lengths on the command line."""
