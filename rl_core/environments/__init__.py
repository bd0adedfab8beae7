"""Environments: harness (the turn loop), world (where tools act), reward (the rubric), and the task sets."""
