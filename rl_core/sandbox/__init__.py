"""sandboxd: the one process that starts worlds for model-written code, its layers of isolation, and its client."""
