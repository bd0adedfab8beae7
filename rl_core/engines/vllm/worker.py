"""vLLM's worker extension: what the sidecar asks of a worker by `collective_rpc`.

vLLM mixes the class into its own worker, so every name starts with `slipway_`. Arguments and results are JSON texts:
vLLM's HTTP interface carries nothing else. Importing the module registers the weight-transfer engine.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rl_core.engines.protocol import TargetBody
from rl_core.engines.vllm.messages import BACKEND, RoutesSource, WorkerStatus, ticket_in
from rl_core.engines.vllm.routes import RouteRecorder
from rl_core.engines.vllm.transfer import DeltaTransferEngine
from rl_core.engines.vllm.twin import TwinModel
from rl_core.errors import EngineError, RlCoreError

# vLLM shows what is logged below its own name.
log = logging.getLogger(f"vllm.{__name__}")

WeightTransferEngineFactory.register_engine(BACKEND, DeltaTransferEngine)


class _Meter:
    """Wraps a runner's `execute_model`: times its steps, counts their tokens, hands their rows to the recorder."""

    def __init__(self, runner: Any, recorder: RouteRecorder | None) -> None:
        self.recorder = recorder
        self.steps_total = 0
        self.busy_s_total = 0.0
        self.step_times_s: deque[float] = deque(maxlen=512)
        self._prompts: dict[str, int] = {}
        self._sampled: dict[str, int] = {}  # by ticket
        self._asked: set[str] = set()
        self._runner = runner
        self._execute = runner.execute_model
        runner.execute_model = self._step

    def _step(self, scheduler_output: Any, *others: Any, **named: Any) -> Any:
        started = time.perf_counter()
        if self.recorder is not None:
            self.recorder.begin_step()
        result = self._execute(scheduler_output, *others, **named)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return result
        if self.recorder is not None:
            self.recorder.end_step(self._runner, scheduler_output.num_scheduled_tokens)
        self._count(scheduler_output)
        seconds = time.perf_counter() - started
        self.steps_total += 1
        self.busy_s_total += seconds
        self.step_times_s.append(seconds)
        return result

    def counts(self, in_flight: list[str]) -> dict[str, int]:
        """Tokens sampled so far, by the tickets `in_flight` that have any.

        A request that ended counts for as long as the sidecar has it: its last tokens may be on their way there. What
        was here the last time and is not in flight now has left it.
        """
        for ticket in self._asked.difference(in_flight):
            self._sampled.pop(ticket, None)
        self._asked = set(self._sampled)
        return {ticket: self._sampled[ticket] for ticket in in_flight if ticket in self._sampled}

    def _count(self, step: Any) -> None:
        for identity in step.finished_req_ids:
            self._prompts.pop(identity, None)
        computed = dict(
            zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens, strict=True)
        )
        for new in step.scheduled_new_reqs:
            self._prompts.setdefault(new.req_id, len(new.prompt_token_ids or ()))
            computed[new.req_id] = new.num_computed_tokens
        for identity, count in step.num_scheduled_tokens.items():
            ticket = ticket_in(identity)
            if ticket is None:
                continue
            # The step that computes the prompt's last token samples the first one. A request that was preempted
            # computes what it had sampled again.
            sampled = computed[identity] + count - self._prompts[identity] + 1
            if sampled > self._sampled.get(ticket, 0):
                self._sampled[ticket] = sampled


class DeltaWorkerExtension:
    """Mixed into vLLM's worker, whose attributes it uses."""

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool
    _slipway_attached = False

    def slipway_attach(self, source: str, twin: str) -> str:
        """Read the shadow from a `TransferSource`, or null; hook into the model runner, once; the status.

        A twin of the model is made where `twin` is `yes`. Nothing is raised: when one worker raises, vLLM leaves the
        answers of others unread, and takes them for those to its next call.
        """
        engine = self._slipway_engine()
        self._slipway_attached = False
        try:
            where = msgspec.json.decode(source)
            if where is not None:
                engine.init_transfer_engine(engine.parse_init_info(where))
            if getattr(self, "_slipway_meter", None) is None:
                self._slipway_hook(twin == "yes")
        except RlCoreError as error:
            engine.give_up(error, "attaching")
        except Exception as error:
            log.exception("attach_fault")
            engine.give_up(EngineError(f"attaching failed: {type(error).__name__}: {error}"), "attaching")
        else:
            self._slipway_attached = True
        return self.slipway_status()

    def slipway_prepare(self, target: str) -> str:
        """Start on a target, a `TargetBody`; the status."""
        self._slipway_engine().prepare(msgspec.json.decode(target, type=TargetBody))
        return self.slipway_status()

    def slipway_status(self) -> str:
        """A `WorkerStatus`."""
        engine, meter = self._slipway_engine(), getattr(self, "_slipway_meter", None)
        steps = list(meter.step_times_s) if meter else []
        status = WorkerStatus(
            version=engine.version,
            root=engine.root,
            state=engine.state,
            swaps=engine.swaps,
            attached=self._slipway_attached,
            updating=bool(self._weight_update_active),
            damaged=engine.damaged,
            poisoned=engine.poisoned,
            shadow_bytes=engine.shadow_bytes,
            prefix_caching=bool(self.vllm_config.cache_config.enable_prefix_caching),
            routes=self._slipway_routes(),
            target=engine.target,
            error=str(engine.error) if engine.error else None,
            error_code=engine.error.code if engine.error else None,
            error_retryable=bool(engine.error and engine.error.retryable),
            progress=engine.progress,
            update=engine.update,
            decode_steps_total=meter.steps_total if meter else 0,
            decode_step_median_s=statistics.median(steps) if steps else 0.0,
            decode_step_max_s=max(steps, default=0.0),
            busy_s_total=meter.busy_s_total if meter else 0.0,
        )
        return msgspec.json.encode(status).decode()

    def slipway_counts(self, in_flight: str) -> str:
        """Output tokens so far of the tickets in flight, exact while vLLM is paused; it may forget all others."""
        meter = getattr(self, "_slipway_meter", None)
        tickets = msgspec.json.decode(in_flight, type=list[str])
        return msgspec.json.encode(meter.counts(tickets) if meter else {}).decode()

    def slipway_take_routes(self, request_id: str) -> str:
        """The routed experts of a finished request, a `WorkerRoutes` or null; once."""
        meter = getattr(self, "_slipway_meter", None)
        recorder = meter.recorder if meter else None
        return msgspec.json.encode(recorder.take(request_id) if recorder else None).decode()

    def _slipway_hook(self, twin: bool) -> None:
        # vLLM's attention computes with AMX tiles where a CPU has them, and the kernel kills a process that does so
        # without having asked: which only happens when some larger product comes first.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        models, recorder = [self.model_runner.get_model()], None
        if twin:
            self._slipway_engine().twin = made = TwinModel(self.model_runner, self.vllm_config)
            models.append(made.model)
        if self._slipway_routes() is RoutesSource.RECORDER:
            recorder = RouteRecorder(*models, experts=self.vllm_config.model_config.get_num_experts())
        self._slipway_meter = _Meter(self.model_runner, recorder)

    def _slipway_engine(self) -> DeltaTransferEngine:
        engine = self.weight_transfer_engine
        assert isinstance(engine, DeltaTransferEngine), f"vLLM was started without the {BACKEND!r} backend"
        return engine

    def _slipway_routes(self) -> RoutesSource:
        if self.vllm_config.aux_output_config.enable_return_routed_experts:
            return RoutesSource.VLLM
        if not self.vllm_config.model_config.get_num_experts():
            return RoutesSource.NONE
        return RoutesSource.NONE if self.vllm_config.cache_config.enable_prefix_caching else RoutesSource.RECORDER
