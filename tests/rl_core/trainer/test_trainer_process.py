import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch

from rl_core.delta import read_manifest, weights_root
from rl_core.delta.manifest import StandingSegment
from rl_core.errors import (
    BaseMismatch,
    DigestMismatch,
    ModelError,
    ObjectMissing,
    SpecError,
    TrainerError,
    TrainerLost,
    TrajectoryError,
)
from rl_core.models.checkpoint import read_checkpoint
from rl_core.specs import RunSpec, resolve_run_spec
from rl_core.store import open_store
from rl_core.trainer.client import TrainerProcess
from rl_core.trainer.messages import Op
from tests.rl_core.models.tiny_models import make_folder
from tests.rl_core.trainer.rollouts import make_rollouts, make_stage

torch.set_num_threads(1)

LINEAGE = "lin"


class Bench:
    """A store with rollouts, a model, and the requests of a run over them."""

    def __init__(self, root) -> None:
        self.root = root
        self.model = make_folder(root)
        self.url = (root / "store").as_uri()
        self.store = open_store(self.url)
        self.base = {"version": f"{LINEAGE}:0-0", "root": weights_root(read_checkpoint(self.model)), "manifest": None}

    def opening(self, **changes) -> dict:
        stage = resolve_run_spec(RunSpec(model="m", stages=(make_stage(),)))["stages"][0]
        return {
            "run": "run", "model_dir": str(self.model), "store_url": self.url, "seed": 5, "lineage": LINEAGE,
            "checkpoint_root": str(self.root / "checkpoints"), "stage": stage, "epoch": 0,
            "checkpoint": None, "threads": 1,
        } | changes  # fmt: skip

    def stepping(self, step: int, *, fence: int, **changes) -> dict:
        refs = []
        for rollout in make_rollouts(groups=4, seed=step):
            key = f"rollouts/{step}/{rollout.id}"
            if not self.store.exists(key):
                self.store.put(key, rollout.trajectory.to_bytes())
            refs.append({"id": rollout.id, "group": rollout.group, "reward": rollout.reward, "blob": key})
        return {
            "step": step, "fence": fence, "version": f"{LINEAGE}:0-{step}", "base": self.base, "rollouts": refs,
            "publish": True,
        } | changes  # fmt: skip

    def damaged_blob(self) -> str:
        """A trajectory that reads well and is another than was stored."""
        good, other = (rollout.trajectory.to_bytes() for rollout in make_rollouts(groups=4, seed=1)[:2])
        key = self.store.put_blob(good)
        (self.root / "store" / key).write_bytes(other)
        return key

    def step(self, trainer: TrainerProcess, step: int, *, fence: int, **changes) -> dict:
        request = self.stepping(step, fence=fence, **changes)
        result = trainer.call(Op.STEP, timeout_s=60, **request)
        if result.get("manifest"):
            self.base = {"version": request["version"], "root": result["root"], "manifest": result["manifest"]}
        return result


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def trainer():
    with TrainerProcess.start() as process:
        yield process


def test_a_run_steps_publishes_checkpoints_and_exports(bench, trainer):
    position = trainer.open(timeout_s=60, **bench.opening())
    assert (position.run, position.epoch, position.step) == ("run", 0, 0)
    seen = []
    result = trainer.call(Op.STEP, timeout_s=60, progress=seen.append, **bench.stepping(1, fence=3))
    assert trainer.position is not None
    assert (trainer.position.step, trainer.position.fence) == (1, 3)
    assert {entry["phase"] for entry in seen} == {"read", "packs", "optimizer", "publish"}
    assert 0 < result["changed_elements"] <= result["elements"]
    assert bench.store.exists(result["manifest"])
    manifest = read_manifest(bench.store, result["manifest"])
    told = [msgspec.convert(entry["stands"], type=StandingSegment) for entry in seen if "stands" in entry]
    assert [one.segment for one in told] == manifest.segments
    assert [frame for one in told for frame in one.frames] == manifest.frames
    assert result["metrics"]["step"] == 1
    assert set(result["seconds"]) == {"read", "train", "publish"}
    saved = trainer.call(Op.CHECKPOINT, timeout_s=60, fence=4)
    assert os.path.isdir(saved["folder"])
    exported = trainer.call(Op.EXPORT, timeout_s=60, folder=str(bench.root / "out"))
    assert exported["root"] == result["root"] == weights_root(read_checkpoint(bench.root / "out"))
    assert trainer.call(Op.POSITION) == {}
    trainer.close()
    assert not trainer.alive


def test_killed_and_rebuilt_it_publishes_the_same_roots(bench, trainer):
    trainer.open(timeout_s=60, **bench.opening())
    bench.step(trainer, 1, fence=1)
    saved = trainer.call(Op.CHECKPOINT, timeout_s=60, fence=1)
    base = bench.base
    expected = [bench.step(trainer, step, fence=step)["root"] for step in (2, 3)]
    os.kill(trainer.pid, signal.SIGKILL)
    with pytest.raises(TrainerLost, match="checkpoint"):
        bench.step(trainer, 4, fence=4)

    bench.base = base
    with TrainerProcess.start() as rebuilt:
        position = rebuilt.open(timeout_s=60, **bench.opening(checkpoint=saved["folder"], seed=77, fence=10))
        assert position.step == 1
        assert [bench.step(rebuilt, step, fence=step + 10)["root"] for step in (2, 3)] == expected


def test_an_interrupted_call_leaves_no_answer_for_the_next_one(bench, trainer):
    class TimeIsUp(Exception):
        """What a worker's time limit raises in the middle of anything."""

    def time_is_up(number, frame):
        raise TimeIsUp

    trainer.open(timeout_s=60, **bench.opening())
    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        with pytest.raises(TimeIsUp):
            trainer.call(
                Op.STEP,
                timeout_s=60,
                progress=lambda _: os.kill(os.getpid(), signal.SIGALRM),
                **bench.stepping(1, fence=1),
            )
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not trainer.alive
    with pytest.raises(TrainerLost):
        trainer.call(Op.POSITION, timeout_s=60)


def test_a_failed_publication_is_asked_for_again(bench, trainer):
    trainer.open(timeout_s=60, **bench.opening())
    first = bench.step(trainer, 1, fence=1, publish=False)
    assert "manifest" not in first
    with pytest.raises(TrainerLost, match="other rollouts"):
        trainer.call(
            Op.STEP, timeout_s=60, **bench.stepping(1, fence=1, rollouts=bench.stepping(2, fence=1)["rollouts"][:3])
        )
    again = bench.step(trainer, 1, fence=2)
    assert again["root"] == first["root"]
    assert again["metrics"] == first["metrics"]
    with pytest.raises(TrainerLost, match="stands after step 1"):
        bench.step(trainer, 1, fence=2)


def test_requests_that_do_not_fit_are_refused_and_the_trainer_goes_on(bench, trainer):
    with pytest.raises(TrainerLost, match="open one first"):
        bench.step(trainer, 1, fence=1)
    with pytest.raises(ModelError, match="not a model folder"):
        trainer.open(**bench.opening(model_dir=str(bench.root / "nowhere")))
    with pytest.raises(SpecError, match="stage"):
        trainer.open(**bench.opening(stage={"kind": "rl", "stepz": 3}))
    with pytest.raises(TrainerError, match="not valid"):
        trainer.open(**bench.opening(seed="x"))
    with pytest.raises(TrainerError, match="not valid"):
        trainer.call("dance")
    trainer.open(timeout_s=60, fence=5, **bench.opening())
    for changes, error in (
        ({"fence": 4}, TrainerLost),
        ({"step": 3}, TrainerLost),
        ({"version": "other:0-1"}, TrainerLost),
        ({"version": f"{LINEAGE}:1-1"}, TrainerLost),
        ({"version": "no version"}, SpecError),
        ({"base": bench.base | {"root": "0" * 64}}, BaseMismatch),
        ({"rollouts": [{"id": "a", "group": "g", "reward": 1.0, "blob": "not/there"}]}, ObjectMissing),
    ):
        with pytest.raises(error):
            trainer.call(Op.STEP, timeout_s=60, **(bench.stepping(1, fence=6) | changes))
    bench.store.put("broken", b"no trajectory")
    broken = [{"id": "a", "group": "g", "reward": 1.0, "blob": "broken"}]
    with pytest.raises(TrajectoryError):
        trainer.call(Op.STEP, timeout_s=60, **bench.stepping(1, fence=6, rollouts=broken))
    damaged = [{"id": "a", "group": "g", "reward": 1.0, "blob": bench.damaged_blob()}]
    with pytest.raises(DigestMismatch):
        trainer.call(Op.STEP, timeout_s=60, **bench.stepping(1, fence=6, rollouts=damaged))
    with pytest.raises(ModelError, match="exists"):
        trainer.call(Op.EXPORT, folder=str(bench.root))
    assert bench.step(trainer, 1, fence=6)["metrics"]["step"] == 1


def test_no_answer_in_time_loses_the_trainer(bench, trainer):
    with pytest.raises(TrainerLost, match="in time"):
        trainer.open(timeout_s=0.01, **bench.opening())
    assert not trainer.alive


PARENT = """
import sys, time
from rl_core.trainer.client import TrainerProcess
trainer = TrainerProcess.start()
print(trainer.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_cleanly_when_it_is_closed(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = TrainerProcess.start(stderr=stderr)
    with pytest.raises(TrainerLost, match="no run is open"):
        process.call(Op.CHECKPOINT, fence=1)
    process.close()
    assert process._process.returncode == 0
    assert "Fatal" not in log.read_text()
    assert len(log.read_text().splitlines()) == 1  # the refused request


def test_it_dies_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_client_imports_without_torch():
    code = "import sys, rl_core.trainer.client; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_trainer_that_does_not_read_is_lost():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    trainer = TrainerProcess(process)
    with pytest.raises(TrainerLost, match="did not read in time"):
        trainer.call(Op.STEP, timeout_s=1, rollouts="r" * 300_000)
    assert not trainer.alive


def test_a_request_longer_than_a_pipe_is_read():
    code = "import sys, json; print(json.dumps({'result': {'read': len(sys.stdin.readline())}}), flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    with TrainerProcess(process) as trainer:
        assert trainer.call(Op.STEP, timeout_s=60, rollouts="r" * 300_000)["read"] > 300_000


TELLS = """
import sys, time
sys.stdin.readline()
for done in range(12):
    time.sleep(0.5)
    print('{"progress": {"done": %d}}' % done, flush=True)
time.sleep(float(sys.argv[1]))
print('{"result": {"step": 1}}', flush=True)
"""


@pytest.mark.parametrize("silent_s", [0, 60])
def test_a_step_takes_as_long_as_it_tells_how_far_it_is(silent_s):
    command = [sys.executable, "-c", TELLS, str(silent_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    trainer, seen = TrainerProcess(process), []
    if silent_s:
        with pytest.raises(TrainerLost, match="in time"):
            trainer.call(Op.STEP, timeout_s=5, progress=seen.append)
    else:
        assert trainer.call(Op.STEP, timeout_s=5, progress=seen.append) == {"step": 1}
    assert [one["done"] for one in seen] == list(range(12))
    trainer.close()
    assert not trainer.alive
