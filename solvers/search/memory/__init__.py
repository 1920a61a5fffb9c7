"""Few requests under scarce KV memory, put one by one back from the end."""
