"""Jobs on servers that are already running: client, dispatch, probe and the job itself."""
