"""Forms of the pages: they parse; services decide."""
