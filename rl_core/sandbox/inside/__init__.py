"""What runs inside every sandbox, as its first program.

These modules are handed to the sandbox's Python compiled, so they import the standard library alone, and of that only
what starts at once: `json`, `base64`, `signal`, `ctypes` or `contextlib` would take longer to import than all else here
takes to run. They share a user with the code they start: whatever they report is data that sandboxd bounds and checks
again, never trusts.
"""
