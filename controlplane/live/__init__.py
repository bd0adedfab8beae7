"""The websocket: events of the log, as they are committed."""
