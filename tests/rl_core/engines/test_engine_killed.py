"""An engine killed in the middle of an update comes back with whole weights: its folder's, then the version's."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import engine_factories as make
import engine_process as server
import msgspec
import pytest

from rl_core.delta import Base, publish_delta, publish_snapshot
from rl_core.delta.manifest import StandingSegment
from rl_core.engines.client import EngineClient
from rl_core.engines.protocol import AnnounceBody, SlotState, StandingRef
from rl_core.errors import EngineUnreachable
from rl_core.models.checkpoint import read_checkpoint, write_checkpoint
from rl_core.store import open_store
from rl_core.types import SamplingParams, VersionRef

PROMPT, GREEDY = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=24)
OLD, NEW = VersionRef("line", 0, 0), VersionRef("line", 0, 1)
# A segment is decoded of a version that nobody has to serve yet; the delta is in the shadow and its root unchecked; two
# of three layers are packed; the decode thread has flipped and nobody was told.
EARLY = ("rl_core.delta.early", "EarlyHop", "advance", 1)
PLACES = (
    EARLY,
    ("rl_core.delta.apply", "HopApplication", "apply", 1),
    ("rl_core.engines.weights", "_Packer", "_layer", 2),
    ("rl_core.engines.scheduler", "Scheduler", "_commit", 1),
)
# The engine, which kills itself after so many calls of a method from when the file is there.
DYING = """
import importlib, os, signal, sys
module, kind, name, left = {place!r}
victim = getattr(importlib.import_module(module), kind)
before = getattr(victim, name)
def die_after(*arguments, **named):
    global left
    result = before(*arguments, **named)
    left -= os.path.exists({armed!r})
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(victim, name, die_after)
from rl_core.engines.__main__ import main
sys.exit(main())
"""


@pytest.mark.full
async def test_an_engine_killed_anywhere_in_an_update_serves_old_or_new_weights_whole(tmp_path: Path) -> None:
    folder, state, armed = make.endless_model_folder(tmp_path / "m"), tmp_path / "state", tmp_path / "armed"
    store = open_store((state / "store").as_uri())
    tensors = read_checkpoint(folder)
    new = {**tensors, **make.perturbed(tensors, seed=1)}
    first = publish_snapshot(store, tensors, key_prefix="snapshots/line", version=OLD)
    base = Base(str(OLD), first.root, first.manifest_key)
    told: list[StandingSegment] = []
    second = publish_delta(store, old=tensors, new=new, version=NEW, base=base, fence=0, on_segment=told.append)
    segments = [msgspec.convert(msgspec.to_builtins(one), type=StandingRef) for one in told]
    announced = AnnounceBody(version=str(NEW), fence=0, slots=["default"], segments=segments)
    write_checkpoint(tmp_path / "new", new, like=folder)
    old_tokens, new_tokens = tokens_of(folder), tokens_of(tmp_path / "new")
    assert old_tokens != new_tokens

    for place in (*PLACES, None):
        dying = ("-c", DYING.format(place=place, armed=str(armed)))
        program = server.PROGRAM if place is None else dying
        flags = {"spool": tmp_path / "spool"}
        with server.running_engine(folder, state, program=program, **flags) as engine, engine.control() as control:
            slot = control.status().slots["default"]
            assert (slot.version, slot.root, slot.state) == (None, first.root, SlotState.READY)
            assert await answer(engine) == (old_tokens, "")
            armed.touch()
            if place is EARLY:
                control.announce(announced)
            else:
                control.set_target(version=str(NEW), root=second.root, manifest=second.manifest_key)
            if place is None:
                slot = control.wait_version(str(NEW))
                assert (slot.version, slot.root, slot.error) == (str(NEW), second.root, None)
                assert await answer(engine) == (new_tokens, str(NEW))
                continue
            with contextlib.suppress(EngineUnreachable):  # until its end it answers as what it was
                while True:
                    assert await answer(engine) == (old_tokens, "")
            assert engine.process.wait(20) == -signal.SIGKILL
            armed.unlink()


async def answer(engine: server.EngineProcess) -> tuple[list[int], str]:
    """Tokens, and the versions that sampled them."""
    async with EngineClient(engine.url, server.INFERENCE_TOKEN) as client:
        result = await client.generate(PROMPT, GREEDY)
    return result.token_ids, ",".join(span.version for span in result.spans)


def tokens_of(folder: Path) -> list[int]:
    engine = make.make_engine(folder)
    try:
        return make.generate(engine, PROMPT, temperature=0.0, max_tokens=24).token_ids
    finally:
        engine.close()
