"""Models and tokenizers: loading, families, sampling, self-check."""
