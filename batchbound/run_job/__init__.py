"""Plans carried out on a model: what is loaded, what it depends on, what is written."""
