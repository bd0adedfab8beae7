"""Pages: selectors, templates, small ES modules."""
