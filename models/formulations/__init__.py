"""Formulations of the scheduling problem, each as one neutral linear model."""
