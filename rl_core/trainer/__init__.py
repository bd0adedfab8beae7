"""The trainer: advantages, losses, one optimiser step, checkpoints, and the resident process that runs them.

`rl_core.trainer.client` and `rl_core.trainer.messages` import without torch.
"""
