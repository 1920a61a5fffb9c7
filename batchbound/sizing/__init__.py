"""Size deployments for jobs with completion windows."""
