"""Jobs on running servers: client, dispatch, probe and job."""
