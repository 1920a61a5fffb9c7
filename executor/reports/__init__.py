"""What a run was worth: reports, tables, charts, traces for viewers."""
