"""Plans for other engines; an engine is imported only when it is used."""
