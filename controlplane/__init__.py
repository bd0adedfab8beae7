"""The Django project: tables, every write, every read, the API, the gateway and the live stream."""
