"""Celery tasks: an interface like the API is. They parse, call, and translate errors.

    base       claim, lease, log context, errors        leases     the renewing thread
    rollout    the rollout queue                        slices     driving many sessions in one loop
    score      the score queue                          replicas   which engine a turn goes to
    train      the train queue                          trainers   the resident trainer and its position
    transfer   the transfer queue                       shadow     recorded prompts on a candidate
    control    the control queue: exports               notify     alerts on their way to hooks

No module here imports torch when it is imported: a rollout worker stays small.
"""

from workers import control, notify, rollout, score, shadow, train, transfer

__all__ = ["control", "notify", "rollout", "score", "shadow", "train", "transfer"]
