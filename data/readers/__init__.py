"""Files of other people read: batch files, tables, traces, profiles, and the generators."""
