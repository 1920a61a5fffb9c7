"""Reports of runs: tables, charts, audits, traces for viewers."""
