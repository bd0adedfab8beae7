"""The OpenAI-compatible front of a lane, and the signed webhook through which products send feedback."""
