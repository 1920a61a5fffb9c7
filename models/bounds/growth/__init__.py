"""The argument that the tokens in the KV cache grow and fall: statement, closed form, linear programmes."""
