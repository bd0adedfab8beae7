"""Every read that is more than a lookup. Functions are named `<entity>_<what>`."""
