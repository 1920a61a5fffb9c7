"""ExeGPT's timing model: a configuration's performance from a profile and length distributions."""
