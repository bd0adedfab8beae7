"""Celery tasks: an interface like the API is. They parse, call, and translate errors.

    base       claim, lease, log context, errors        leases     the renewing thread
    rollout    the rollout queue                        slices     driving many sessions in one loop
    score      the score queue                          replicas   which engine a turn goes to
    train      the train queue                          trainers   the resident trainer and its position
    transfer   the transfer queue                       shadow     recorded prompts on a candidate
    control    the control queue: exports               notify     alerts on their way to hooks
    derive     skip-deltas, snapshots, formats     weights    a version's weights in this process
    prove      task sets held to their own tests

No module here imports torch when it is imported: a rollout worker stays small.
"""

from workers import control, derive, notify, prove, rollout, score, shadow, train, transfer

__all__ = ["control", "derive", "notify", "prove", "rollout", "score", "shadow", "train", "transfer"]
