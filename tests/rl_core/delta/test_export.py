"""A version as a Hugging Face folder: whole or not there, in several files, with the tokens that the engine gives."""

import json
import subprocess
import sys

import engine_factories as make
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rl_core.delta import Base, Target, publish_delta, publish_snapshot, weights_root
from rl_core.delta.__main__ import main
from rl_core.delta.export import export_folder
from rl_core.delta.words import DTYPES
from rl_core.errors import ModelError
from rl_core.formats import serving_weights
from rl_core.models import checkpoint
from rl_core.models.checkpoint import read_checkpoint, validate_model_folder, write_checkpoint
from rl_core.store import open_store
from rl_core.types import VersionRef, WeightFormat


@pytest.fixture
def trained(tmp_path):
    """A model's folder, a store with a version trained from it, and where that version is."""
    folder = make.make_model_folder(tmp_path / "model")
    store = open_store(tmp_path / "store")
    old = read_checkpoint(folder)
    new = {**old, **make.perturbed(old, seed=1, share=0.3)}
    first, second = VersionRef("lin", 0, 0), VersionRef("lin", 0, 1)
    whole = publish_snapshot(store, old, key_prefix="snapshots/a", version=first)
    base = Base(str(first), whole.root, whole.manifest_key)
    delta = publish_delta(store, old=old, new=new, version=second, base=base, fence=0)
    return folder, store, Target(version=str(second), root=delta.root, manifest=delta.manifest_key), new


def engine_tokens(folder, prompt):
    engine = make.make_engine(folder)
    try:
        return list(make.generate(engine, prompt, temperature=0.0, max_tokens=24).token_ids)
    finally:
        engine.close()


def test_transformers_and_the_engine_give_the_same_tokens_on_an_exported_folder(trained, tmp_path):
    folder, store, target, _ = trained
    export_folder(store, target, tmp_path / "out", model=folder)
    validate_model_folder(tmp_path / "out")
    assert weights_root(read_checkpoint(tmp_path / "out")) == target.root
    prompt = list(b"what comes next?")
    said = engine_tokens(tmp_path / "out", prompt)
    model = make.hf_model(tmp_path / "out")
    greedy = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=258)
    assert said == greedy[0, len(prompt) :].tolist()
    assert engine_tokens(folder, prompt) != said  # of other weights


@pytest.mark.parametrize("tag", DTYPES)
def test_a_checkpoint_of_any_dtype_comes_out_with_the_same_bits_shapes_and_tags(tag, tmp_path):
    dtype, shapes = DTYPES[tag], {"large": (600, 2048), "small": (3, 8), "none": (0, 4)}
    random, bound = np.random.default_rng(3), 2 if dtype is torch.bool else 256

    def drawn(shape):
        numbers = random.integers(0, bound, (*shape, dtype.itemsize), np.uint8)
        return torch.from_numpy(numbers.reshape(-1)).view(dtype).reshape(shape)

    old = {name: drawn(shape) for name, shape in shapes.items()}
    model = make.make_model_folder(tmp_path / "model")
    save_file(old, model / "model.safetensors")
    new = {**old, "large": torch.cat([old["large"][:1], drawn((599, 2048))])}
    write_checkpoint(tmp_path / "wanted", new, like=model)
    store, versions = open_store(tmp_path / "store"), [VersionRef("lin", 0, number) for number in range(2)]
    whole = publish_snapshot(store, read_checkpoint(model), key_prefix="snapshots/a", version=versions[0])
    base = Base(str(versions[0]), whole.root, whole.manifest_key)
    delta = publish_delta(store, old=old, new=new, version=versions[1], base=base, fence=0)
    target = Target(version=str(versions[1]), root=delta.root, manifest=delta.manifest_key)
    export_folder(store, target, tmp_path / "out", model=model)
    written, wanted = (tmp_path / folder / "model.safetensors" for folder in ("out", "wanted"))
    assert written.read_bytes() == wanted.read_bytes()
    assert f'"dtype":"{tag}"'.encode() in written.read_bytes()[:400]
    assert weights_root(read_checkpoint(tmp_path / "out")) == weights_root(new)


def test_large_weights_are_spread_over_files_that_transformers_reads(trained, tmp_path):
    folder, _, target, new = trained
    write_checkpoint(tmp_path / "out", new, like=folder, shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert (set(index["weight_map"]), set(index["weight_map"].values())) == (set(new), set(files))
    validate_model_folder(tmp_path / "out")
    assert weights_root(read_checkpoint(tmp_path / "out")) == target.root
    state = make.hf_model(tmp_path / "out").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in new.items())


def test_a_write_that_breaks_off_leaves_nothing_that_looks_whole(trained, tmp_path, monkeypatch):
    folder, _, _, new = trained
    save, written = checkpoint.save_file, []

    def full_disk(*args, **values):
        if written:
            raise OSError(28, "No space left on device")
        written.append(save(*args, **values))

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path / "out", new, like=folder, shard_bytes=40_000)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".part-*"))
    monkeypatch.undo()
    write_checkpoint(tmp_path / "out", new, like=folder)
    with pytest.raises(ModelError, match="exists"):
        write_checkpoint(tmp_path / "out", new, like=folder)


def test_a_process_that_is_killed_while_it_writes_leaves_no_folder(trained, tmp_path, capsys):
    folder, store, target, _ = trained
    killed = (
        "import os, signal, sys\n"
        "from rl_core.models import checkpoint\n"
        "checkpoint._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from rl_core.delta.__main__ import main\n"
        "main(sys.argv[1:])\n"
    )
    words = ["export", "--model", str(folder), "--store", store.url, "--folder", str(tmp_path / "out")]
    words += ["--target", msgspec.json.encode(target).decode()]
    done = subprocess.run([sys.executable, "-c", killed, *words], capture_output=True, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "out").exists()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["root"] == target.root
    assert weights_root(read_checkpoint(tmp_path / "out")) == target.root


def test_a_serving_format_is_written_with_what_engines_have_to_know(trained, tmp_path):
    folder, store, target, new = trained
    export_folder(store, target, tmp_path / "out", model=folder, weight_format=WeightFormat.FP8_BLOCK)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert weights_root(read_checkpoint(tmp_path / "out")) == weights_root(serving_weights(new, WeightFormat.FP8_BLOCK))


def test_the_command_says_what_is_wrong_in_one_line(trained, tmp_path, capsys):
    folder, store, _, _ = trained
    words = ["export", "--model", str(folder), "--store", store.url, "--folder", str(tmp_path / "out")]
    assert main([*words, "--target", "{}"]) == 1
    assert capsys.readouterr().err.startswith("error: --target is no target")
