"""The learning library of Slipway: usable by itself, with no web framework, queue or database behind it."""
