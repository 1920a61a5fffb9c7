"""ExeGPT's timing model: performance from a profile and lengths."""
