"""Sizing of deployments: seconds of a job, and the least that any needs."""
