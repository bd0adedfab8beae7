"""A world whose state is a file tree: a repository that tools read, edit and run commands in."""
