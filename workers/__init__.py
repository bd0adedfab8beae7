"""Celery tasks: an interface like the API is. They parse, call, and translate errors."""
