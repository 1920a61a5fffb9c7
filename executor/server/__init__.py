"""A job run on servers that are already up: client, dispatch, probe and the job itself."""
