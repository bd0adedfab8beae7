"""A world's tree is a value: a base and a layer go in, a layer comes out; a hostile tree is refused whole."""

import asyncio

import pytest

from rl_core.errors import SpecError
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits, SnapshotMissing
from rl_core.sandbox.trees import MAX_TREE_FILES, encode_tree, read_index

BASE = {"a.txt": b"a", "d/b.bin": bytes(range(256)), "d/e/deep": b"", "run.sh": b"#!/bin/sh\necho ran\n"}
LIMITS = RunLimits(wall_s=30.0, cpu_s=20, layer_files=40, layer_bytes=100_000)


async def test_what_was_frozen_is_there_and_an_unchanged_tree_has_an_empty_layer(sandbox):
    base = await sandbox.freeze(BASE)
    code = "import os\nprint(os.getcwd())\nfor n in ('a.txt', 'd/b.bin', 'd/e/deep'): print(open(n, 'rb').read())"
    result = await sandbox.run(code=code, base=base)
    assert result.stdout.decode().splitlines() == ["/work/repo", *(str(BASE[n]) for n in list(BASE)[:3])], result
    assert (result.layer, result.layer_refused) == ({}, "")
    assert (await sandbox.run(["./run.sh"], base=base)).stdout == b"ran\n"


async def test_a_layer_is_all_that_differs_and_goes_in_again(sandbox):
    base = await sandbox.freeze(BASE)
    first = await sandbox.run(["sh", "-c", "echo new > d/new; rm a.txt; echo more >> d/b.bin"], base=base)
    assert first.layer == {"a.txt": None, "d/b.bin": BASE["d/b.bin"] + b"more\n", "d/new": b"new\n"}, first
    second = await sandbox.run(["sh", "-c", "cat d/new; rm -r d; echo file > d; ls"], base=base, layer=first.layer)
    assert second.stdout == b"new\nd\nrun.sh\n", second
    gone = {name: None for name in BASE if name != "run.sh"}
    assert second.layer == {**gone, "d": b"file\n"}
    back = "rm d; mkdir -p d/e; echo -n a > a.txt; : > d/e/deep"
    third = await sandbox.run(["sh", "-c", back], base=base, layer=second.layer)
    assert third.layer == {"d/b.bin": None}


async def test_without_a_base_the_layer_is_the_tree(sandbox):
    first = await sandbox.run(["sh", "-c", "echo 1 > one"], layer={})
    assert first.layer == {"one": b"1\n"}
    assert (await sandbox.run(["cat", "one"], layer=first.layer)).layer == first.layer
    assert (await sandbox.run(["true"])).layer is None


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        ("mv x t && mv y x && mv t y", {"x/same": b"2", "y/same": b"1"}),  # the files' inodes and times do not change
        ("ln x/same l && rm x/same && mv l x/same", {}),
        ("cp -p x/same t && rm x/same && mv t x/same", {}),
        ("touch -d @0 x/same && printf 9 > x/same && touch -r y/same x/same", {"x/same": b"9"}),
        ("chmod 700 x/same", {}),
        ("mkdir -p nothing/in/it", {}),
    ],
)
async def test_changes_are_seen_by_value(sandbox, change, layer):
    base = await sandbox.freeze({"x/same": b"1", "y/same": b"2"})
    result = await sandbox.run(["sh", "-c", change], base=base)
    assert (result.exit_code, result.layer, result.layer_refused) == (0, layer, ""), result


async def test_attempts_from_one_state_start_the_same_and_do_not_meet(sandbox):
    base = await sandbox.freeze(BASE)
    state = (await sandbox.run(["sh", "-c", "echo 7 > state"], base=base)).layer
    code = "before = open('state').read()\nopen('state', 'w').write(str({n}))\nprint(before, end='')"
    runs = [sandbox.run(code=code.replace("{n}", str(n)), base=base, layer=state) for n in range(6)]
    results = await asyncio.gather(*runs)
    assert [result.stdout for result in results] == [b"7\n"] * 6
    assert [result.layer for result in results] == [{"state": str(n).encode()} for n in range(6)]


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        ("os.symlink('/etc/passwd', 'out')", "not a regular file"),
        ("os.symlink('..', 'd/up')", "not a regular file"),
        ("os.link('a.txt', 'again')", "hard link"),
        ("os.mkfifo('pipe')", "not a regular file"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('sock')", "not a regular file"),
        ("os.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 90_000)", "sparse"),
        ("os.makedirs('d/' * 100)", "deeper"),
        ("open('new\\nline', 'w')", "unprintable"),
        ("open(b'\\xff', 'w')", "unprintable|unreadable"),
        ("[open(f'{n}', 'w').close() for n in range(20_000)]", "more than"),
        ("[os.mkdir(f'd{n}') for n in range(20_000)]", "more than"),
        ("open('big', 'w').write('x' * 200_000)", "more than 100000 changed bytes"),
        ("[open(f'{n}', 'w').write('x' * 3000) for n in range(35)]", "more than 100000 changed bytes"),
        ("os.chmod('a.txt', 0)", "unreadable"),
        ("os.chmod('d', 0)", "unreadable"),
        ("os.rename('../repo', '../gone')", "unreadable"),
    ],
)
async def test_one_trick_voids_the_layer(sandbox, trick, reason):
    base = await sandbox.freeze(BASE)
    result = await sandbox.run(code=f"import os\nopen('good', 'w').write('good')\n{trick}", base=base, limits=LIMITS)
    assert result.outcome is Outcome.OK, result
    assert result.layer is None
    assert any(part in result.layer_refused for part in reason.split("|")), result


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"../x": b""}, "relative path"),
        ({"/x": b""}, "relative path"),
        ({"a/./b": b""}, "relative path"),
        ({"a//b": b""}, "relative path"),
        ({"": b""}, "relative path"),
        ({"a\nb": b""}, "relative path"),
        ({"x" * 300: b""}, "relative path"),
        ({"a/" * 40 + "b": b""}, "relative path"),
        ({"a.txt/below": b""}, "a file and a folder"),
        ({"d": b""}, "a file and a folder"),
        ({"none": None}, "does not have"),
        ({f"f{n}": b"" for n in range(20_000)}, "at most 40"),
        ({"big": b"x" * 200_000}, "at most 100000"),
    ],
)
async def test_a_given_layer_that_is_none_is_refused(sandbox, layer, message):
    base = await sandbox.freeze(BASE)
    with pytest.raises(SpecError, match=message):
        await sandbox.run(["true"], base=base, layer=layer, limits=LIMITS)


async def test_the_tree_is_capped_by_the_disk(sandbox):
    base = await sandbox.freeze({"big": b"x" * 2 * MIB})
    with pytest.raises(SpecError, match="do not fit disk_bytes"):
        await sandbox.run(["true"], base=base, limits=RunLimits(disk_bytes=2 * MIB - 1))
    code = "n = 0\ntry:\n    while True: n += open('more', 'ab', 0).write(bytes(4096))\nexcept OSError: print(n)"
    result = await sandbox.run(code=code, base=base, limits=RunLimits(disk_bytes=3 * MIB))
    assert int(result.stdout) <= 1 * MIB
    assert result.layer == {"more": bytes(int(result.stdout))}


async def test_a_run_that_was_cut_off_has_no_layer(sandbox):
    result = await sandbox.run(code="open('x', 'w')\nwhile True: pass", layer={}, limits=RunLimits(wall_s=0.5))
    assert (result.outcome, result.layer) == (Outcome.TIMEOUT, None)
    assert result.layer_refused == "the run did not end by itself"
    crash = await sandbox.run(code="import os\nopen('x', 'w').close()\nos.abort()", layer={})
    assert (crash.outcome, crash.layer) == (Outcome.KILLED, {"x": b""})


async def test_an_unknown_base_is_said(sandbox):
    for name in ("0" * 64, "../../../etc/passwd", "x"):
        with pytest.raises(SnapshotMissing, match="freeze its tree again"):
            await sandbox.run(["true"], base=name)


async def test_trees_that_are_none_are_not_frozen(sandbox):
    many = {f"f{n}": b"" for n in range(MAX_TREE_FILES + 1)}
    for tree, message in (({"../x": b""}, "relative"), ({"a": b"", "a/b": b""}, "folder"), (many, "at most")):
        with pytest.raises(SpecError, match=message):
            await sandbox.freeze(tree)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "not a snapshot"),
        (b"x\n", "not a snapshot"),
        (b"-1\n", "not a snapshot"),
        (b"999999999999\n", "not a snapshot"),
        (b"9\n1 a\nx", "not a snapshot"),
        (b"3\n1 ax", "cut off"),
        (b"4\n1 a\nxy", "add up"),
        (b"4\n2 a\nx", "add up"),
        (b"8\n1 b\n1 a\nxy", "add up"),
        (b"8\n1 a\n1 a\nxy", "add up"),
        (b"5\n-1 a\n", "a size"),
        (b"5\n1 \xffa\nx", "UTF-8"),
        (b"7\n1 ../a\nx", "relative path"),
    ],
)
def test_blobs_that_are_no_snapshot(blob, message):
    with pytest.raises(SpecError, match=message):
        read_index(blob, len(blob))


def test_the_same_tree_has_the_same_name_in_any_order():
    name, blob = encode_tree(BASE)
    assert encode_tree(dict(reversed(BASE.items()))) == (name, blob)
    assert encode_tree(BASE | {"a.txt": b"b"})[0] != name
    offset, size = read_index(blob, len(blob))["d/b.bin"]
    assert blob[offset : offset + size] == BASE["d/b.bin"]
