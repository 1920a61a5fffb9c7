"""Formulations of the scheduling problem as linear models."""
