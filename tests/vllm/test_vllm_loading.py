"""What goes into a model together, which rows of a step become whose routes, and how many tokens a request has."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import torch

from rl_core.engines.vllm.loading import whole_groups
from rl_core.engines.vllm.messages import new_ticket
from rl_core.engines.vllm.routes import RouteRecorder
from rl_core.engines.vllm.worker import _Meter

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "block_sparse_moe.experts.0.w1",
         "block_sparse_moe.experts.10.w1", "input_layernorm")  # fmt: skip
NAMES = [
    "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight",
    *(f"model.layers.{layer}.{part}.weight" for layer in (0, 1, 10) for part in LAYER),
]  # fmt: skip


def layer(number: int) -> set[str]:
    return {name for name in NAMES if f".layers.{number}." in name}


def test_what_is_fused_in_a_layer_goes_in_together_and_alone():
    assert whole_groups(NAMES, []) == []
    for part in LAYER:
        chosen = whole_groups(NAMES, [f"model.layers.1.{part}.weight"])
        assert set(chosen) == layer(1)
        assert len(chosen) == len(LAYER)
    both = whole_groups(NAMES, ["model.layers.10.input_layernorm.weight", "model.norm.weight"])
    assert layer(10) < set(both)
    assert "model.norm.weight" in both
    assert not layer(1) & set(both)
    assert set(whole_groups(NAMES, NAMES)) == set(NAMES)


class _Router(torch.nn.Module):
    capture = None

    def set_capture_fn(self, capture) -> None:
        self.capture = capture


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = _Router()


def step(recorder: RouteRecorder, layers: torch.nn.ModuleList, rows: list[int], requests: dict[str, tuple[int, int]]):
    """One step: `rows` are the first expert of each token, `requests` are where each starts and how long it is."""
    recorder.begin_step()
    for place, one in enumerate(layers):
        one.router.capture(torch.tensor([[row, row + 100 + place] for row in rows]))
    batch = SimpleNamespace(req_ids=list(requests), num_computed_tokens_cpu=[start for start, _ in requests.values()])
    scheduled = {identity: count for identity, (_, count) in requests.items()}
    recorder.end_step(SimpleNamespace(input_batch=batch), scheduled)


def test_rows_go_to_the_requests_that_asked_and_are_kept_as_first_computed():
    layers = torch.nn.ModuleList([_Layer(), _Layer()])
    recorder = RouteRecorder(layers, experts=256)
    step(recorder, layers, [1, 2, 3, 9], {"generate-tokens-routes-a-77": (0, 3), "generate-tokens-b-78": (0, 1)})
    step(recorder, layers, [8, 4], {"generate-tokens-b-78": (1, 1), "generate-tokens-routes-a-77": (3, 1)})
    # Preempted: it computes all of it again, with other weights; what was sampled belongs to the first rows.
    step(recorder, layers, [51, 52, 53, 54, 5], {"generate-tokens-routes-a-77": (0, 5)})
    kept = recorder.take("routes-a")
    assert kept is not None
    assert (kept.tokens, kept.layers, kept.top_k, kept.dtype) == (5, 2, 2, "uint8")
    data = base64.b64decode(kept.data)
    assert list(data[::4]) == [1, 2, 3, 4, 5]
    assert list(data[1:4]) == [101, 1, 102]
    assert recorder.take("routes-a") is None
    assert recorder.take("b") is None


def test_rows_behind_a_gap_are_left_out():
    layers = torch.nn.ModuleList([_Layer()])
    recorder = RouteRecorder(layers, experts=1000)
    step(recorder, layers, [1], {"routes-c": (4, 1)})
    assert recorder.take("routes-c") is None
    step(recorder, layers, [300], {"routes-d": (0, 1)})
    kept = recorder.take("routes-d")
    assert kept is not None
    assert kept.dtype == "uint16"
    assert base64.b64decode(kept.data) == b"\x2c\x01\x90\x01"


def scheduled(prompts: dict[str, int], going_on: dict[str, int], ended: tuple[str, ...] = (), *, tokens: int = 1):
    """A step: new requests with their prompts' lengths, others with what they have computed, and who ended before."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=0)
            for name, length in prompts.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(going_on), num_computed_tokens=list(going_on.values())),
        num_scheduled_tokens=prompts | dict.fromkeys(going_on, tokens),
        total_num_scheduled_tokens=1,
        finished_req_ids=set(ended),
    )


def test_what_a_request_sampled_is_known_for_as_long_as_it_is_in_flight_and_no_longer():
    runner = SimpleNamespace(execute_model=lambda step: None)
    meter = _Meter(runner, None)
    short, long, waiting = (new_ticket() for _ in range(3))
    one, other = f"generate-tokens-{short}-0a1b2c3d", f"chatcmpl-{long}-0a1b2c3d"
    runner.execute_model(scheduled({one: 3, other: 5, "somebody-else": 2}, {}))
    runner.execute_model(scheduled({}, {one: 3, other: 5}))
    runner.execute_model(scheduled({}, {other: 6}, (one,)))
    # It ended in the engine, and is in flight until the last of its tokens has come through HTTP.
    assert meter.counts([short, long, waiting]) == {short: 2, long: 3}
    # Preempted, it computes its five and three again, in two pieces, and samples the fourth.
    runner.execute_model(scheduled({}, {other: 0}, tokens=4))
    assert meter.counts([short, long]) == {short: 2, long: 3}
    runner.execute_model(scheduled({}, {other: 4}, tokens=4))
    late = new_ticket()
    runner.execute_model(scheduled({f"cmpl-{late}-0-0a1b2c3d": 1}, {}))
    # Whoever asks may not know yet of what came meanwhile.
    assert meter.counts([long]) == {long: 4}
    assert meter.counts([long, late]) == {long: 4, late: 1}
    assert meter.counts([short, long, late]) == {long: 4, late: 1}
