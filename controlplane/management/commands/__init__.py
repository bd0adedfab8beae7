"""Management commands, one file each."""
