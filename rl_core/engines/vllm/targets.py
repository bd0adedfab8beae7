"""Targets of the one weight slot that a vLLM has."""

from __future__ import annotations

from functools import partial

from rl_core.engines.protocol import SlotStatus, TargetBody
from rl_core.engines.targets import TargetLoop
from rl_core.engines.vllm.replica import VllmReplica


class VllmTargets(TargetLoop):
    """Prepares targets in vLLM's workers, then swaps."""

    def __init__(self, replica: VllmReplica) -> None:
        super().__init__(replica.slots[0])
        self._replica = replica
        self.start()

    def status(self) -> SlotStatus:
        """Where the slot stands, as of the last look at the workers."""
        with self._wake:
            busy, error, target = self._busy, self._error, self._target
        first = self._replica.workers[0] if self._replica.workers else None
        return SlotStatus(
            version=first.version if first else None,
            root=first.root if first else "",
            state=self._replica.state(busy=busy),
            target=target.version if target else None,
            error=str(error) if error else None,
            error_code=error.code if error else None,
            update=self._replica.update,
            progress=first.progress if first and busy else None,
        )

    def _apply(self, target: TargetBody) -> None:
        self._replica.prepare(target, interrupted=partial(self._overtaken, target))
        self._replica.swap(target)
