"""Statistics of statements: their storage, and their summaries."""
