"""Bug-repair tasks made by mutating real Python: `python -m rl_core.environments.mutation`."""
