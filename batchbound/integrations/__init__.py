"""What other engines can take of a plan; nothing here imports an engine before it is used."""
