import json

import pytest
import torch

from rl_core.errors import CheckpointError
from rl_core.models.parameters import ComputeDtype
from rl_core.trainer.checkpoint import DIGEST, META, STATE, load_checkpoint, read_meta, save_checkpoint
from rl_core.trainer.messages import Position
from rl_core.trainer.trainer import Trainer
from tests.rl_core.models.tiny_models import make_folder
from tests.rl_core.trainer.rollouts import make_rollouts, make_stage

torch.set_num_threads(1)


def make_trainer(folder, *, seed: int = 0, dtype: ComputeDtype = ComputeDtype.FP32) -> Trainer:
    return Trainer(folder, stage=make_stage(), seed=seed, dtype=dtype, token_budget=40)


def save(root, trainer: Trainer, *, fence: int = 1):
    position = Position(run="run", epoch=0, step=trainer.steps, fence=fence)
    return save_checkpoint(root, trainer, position=position, lineage="lin")


def train(trainer: Trainer, seeds: range) -> torch.Tensor:
    for seed in seeds:
        trainer.step(make_rollouts(groups=4, seed=seed))
        trainer.mark_published()
    return trainer.parameters.master.detach().clone()


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def test_resume_is_bit_exact(folder, tmp_path):
    trainer = make_trainer(folder)
    train(trainer, range(2))
    saved = save(tmp_path / "c", trainer)
    expected = train(trainer, range(2, 5))

    resumed = make_trainer(folder, seed=99)  # everything random comes from the checkpoint
    meta = load_checkpoint(saved.folder, resumed, run="run")
    assert (meta.steps, resumed.steps, meta.position.step) == (2, 2, 2)
    assert torch.equal(train(resumed, range(2, 5)), expected)


def test_resume_without_the_generator_is_not(folder, tmp_path):
    """The control: were nothing random in a step, the test above would not notice a generator left behind."""
    trainer = make_trainer(folder)
    train(trainer, range(2))
    saved = save(tmp_path / "c", trainer)
    expected = train(trainer, range(2, 5))

    resumed = make_trainer(folder)
    fresh = resumed.generator.get_state()
    load_checkpoint(saved.folder, resumed, run="run")
    resumed.generator.set_state(fresh)
    assert not torch.equal(train(resumed, range(2, 5)), expected)


def test_an_unpublished_base_is_kept(folder, tmp_path):
    trainer = make_trainer(folder)
    base = trainer.weights()
    trainer.step(make_rollouts())
    saved = save(tmp_path / "c", trainer)
    resumed = make_trainer(folder)
    load_checkpoint(saved.folder, resumed, run="run")
    assert all(torch.equal(base[name], t) for name, t in resumed.base_weights().items())
    assert any(not torch.equal(base[name], t) for name, t in resumed.weights().items())


def test_a_fresh_trainer_can_be_saved(folder, tmp_path):
    saved = save(tmp_path / "c", make_trainer(folder))
    resumed = make_trainer(folder)
    load_checkpoint(saved.folder, resumed, run="run")
    assert torch.equal(train(resumed, range(2)), train(make_trainer(folder), range(2)))


@pytest.mark.parametrize("damage", ["no digest", "no state", "bit flipped", "cut short", "meta changed", "no folder"])
def test_torn_checkpoints_are_refused(folder, tmp_path, damage):
    trainer = make_trainer(folder)
    train(trainer, range(1))
    saved = tmp_path / "c" / save(tmp_path / "c", trainer).folder
    if damage == "no digest":
        (saved / DIGEST).unlink()
    elif damage == "no state":
        (saved / STATE).unlink()
    elif damage == "meta changed":
        meta = json.loads((saved / META).read_text())
        meta["steps"] = 7
        (saved / META).write_text(json.dumps(meta))
    elif damage == "no folder":
        saved = tmp_path / "nowhere"
    else:
        data = bytearray((saved / STATE).read_bytes())
        data[len(data) // 2] ^= 1
        (saved / STATE).write_bytes(data if damage == "bit flipped" else data[:-8])
    before = trainer.parameters.master.detach().clone()
    with pytest.raises(CheckpointError, match="older"):
        load_checkpoint(saved, trainer, run="run")
    assert torch.equal(trainer.parameters.master, before)


def test_another_run_or_dtype_is_refused(folder, tmp_path):
    saved = save(tmp_path / "c", make_trainer(folder))
    with pytest.raises(CheckpointError, match="of run run, not of other"):
        load_checkpoint(saved.folder, make_trainer(folder), run="other")
    with pytest.raises(CheckpointError, match="computed in fp32"):
        load_checkpoint(saved.folder, make_trainer(folder, dtype=ComputeDtype.BF16), run="run")


def test_the_newest_two_stay_and_a_whole_one_is_adopted(folder, tmp_path):
    root = tmp_path / "c"
    trainer = make_trainer(folder)
    digests = []
    for step in range(3):
        train(trainer, range(step, step + 1))
        digests.append(save(root, trainer).digest)
    assert sorted(path.name for path in root.iterdir()) == ["step-000002-f1", "step-000003-f1"]
    stamp = (root / "step-000003-f1" / STATE).stat().st_mtime_ns
    assert save(root, trainer).digest == digests[-1]
    assert (root / "step-000003-f1" / STATE).stat().st_mtime_ns == stamp
    (root / "step-000003-f1" / DIGEST).unlink()  # as a kill would have left it
    assert save(root, trainer).digest == digests[-1]
    assert read_meta(root / "step-000003-f1").steps == 3


def test_a_checkpoint_that_cannot_be_written_says_so(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(blocked, make_trainer(folder))
