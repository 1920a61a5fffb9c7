"""ExeGPT's timing model: what a configuration reaches, from a profile and length distributions."""
