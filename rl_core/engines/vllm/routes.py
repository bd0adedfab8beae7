"""Routed experts by request, where vLLM's own capture does not run: it needs Triton, which a CPU has not.

Every MoE layer's router reports the experts of each row of a step. After the step the runner's batch says which
request and which position a row belongs to. Rows are kept for requests that asked for them, the first time that a
position is computed: recorded logprobs belong to those, and not to what a preempted request computes again.

Positions that come out of the prefix cache are never computed here and have no rows: the recorder is for a vLLM that
runs without prefix caching.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rl_core.engines.vllm.messages import ROUTES_PREFIX, WorkerRoutes

# Requests that were never asked about again (their caller left) make room after this many others.
_MAX_KEPT: Final = 1024


class RouteRecorder:
    """Hooks into the MoE layers of one model runner, and of its model's twin."""

    def __init__(self, *models: torch.nn.Module, experts: int) -> None:
        """`experts` is how many a layer has."""
        self._dtype: Any = np.dtype("uint8" if experts <= 1 << 8 else "<u2")
        self._step: dict[int, NDArray[Any]] = {}
        self._kept: OrderedDict[str, list[NDArray[Any]]] = OrderedDict()
        self._lengths: dict[str, int] = {}
        for model in models:
            routers: list[Any] = [getattr(module, "router", None) for module in model.modules()]
            for place, router in enumerate(router for router in routers if hasattr(router, "set_capture_fn")):
                router.set_capture_fn(self._capture_of(place))

    def begin_step(self) -> None:
        """Forget the rows of the step before."""
        self._step.clear()

    def end_step(self, runner: Any, scheduled: dict[str, int]) -> None:
        """Give the step's rows to their requests. `scheduled` is how many tokens each request had in the step."""
        if not self._step:
            return
        rows = np.stack([self._step[place] for place in sorted(self._step)], axis=1)
        first = 0
        for index, identity in enumerate(runner.input_batch.req_ids):
            count = scheduled.get(identity, 0)
            if ROUTES_PREFIX in identity:
                self._keep(
                    identity, int(runner.input_batch.num_computed_tokens_cpu[index]), rows[first : first + count]
                )
            first += count

    def take(self, request_id: str) -> WorkerRoutes | None:
        """The rows of the request with this external id, once; None where there are none."""
        key = next((key for key in self._kept if request_id in key), None)
        if key is None:
            return None
        parts = self._kept.pop(key)
        del self._lengths[key]
        rows = np.concatenate(parts)
        name = "uint8" if rows.dtype.itemsize == 1 else "uint16"
        data = base64.b64encode(rows.tobytes()).decode()
        return WorkerRoutes(tokens=rows.shape[0], layers=rows.shape[1], top_k=rows.shape[2], dtype=name, data=data)

    def _capture_of(self, place: int) -> Any:
        def capture(experts: torch.Tensor) -> None:
            """`experts`: [tokens, top_k]."""
            self._step[place] = experts.to("cpu").numpy().astype(self._dtype)

        return capture

    def _keep(self, identity: str, start: int, rows: NDArray[Any]) -> None:
        have = self._lengths.get(identity, 0)
        if start > have:
            return  # positions are missing in front: cached ones, whose experts nobody saw
        fresh = rows[have - start :]
        if len(fresh):
            self._kept.setdefault(identity, []).append(fresh.copy())
            self._lengths[identity] = have + len(fresh)
        while len(self._kept) > _MAX_KEPT:
            gone, _ = self._kept.popitem(last=False)
            del self._lengths[gone]
