"""Processes of one machine: embedded PostgreSQL and Valkey, and the supervisor of everything `manage.py up` runs."""
