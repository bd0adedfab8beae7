"""Every write. Functions are named `<entity>_<action>` and take keyword arguments alone."""
