"""Page views: a selector for reading, a service for writing, a template."""
