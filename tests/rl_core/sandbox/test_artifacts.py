"""Artefacts are data: anything odd voids the whole set, and a forged report is not believed."""

import json

import msgspec
import pytest

from rl_core.sandbox.job import read_report
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits

LIMITS = RunLimits(wall_s=30.0, cpu_s=20, artifact_files=16, artifact_bytes=100_000)
GOOD = """
import os
os.makedirs('out/a/b')
open('out/good.txt', 'w').write('good')
open('out/a/b/c', 'wb').write(bytes(range(256)))
"""


async def test_plain_files_come_back(sandbox):
    result = await sandbox.run(code=GOOD, files={"data/x.txt": b"x"}, limits=LIMITS)
    assert result.artifacts == {"good.txt": b"good", "a/b/c": bytes(range(256))}
    assert result.artifacts_refused == ""


async def test_names_come_back_as_they_are(sandbox):
    names = ['a "quoted" name', "back\\slash", "\u00fc\u540d\U0001f40d", "{}[],:"]
    code = f"for name in {names!r}: open('out/' + name, 'w').write(name)"
    result = await sandbox.run(code=code, limits=LIMITS)
    assert result.artifacts == {name: name.encode() for name in names}


async def test_a_refusal_names_the_file_as_it_is(sandbox):
    result = await sandbox.run(code="import os\nos.mkfifo('out/a \"b\" \\\\')", limits=LIMITS)
    assert result.artifacts_refused == 'a "b" \\ is not a regular file'


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        ("os.symlink('/etc/passwd', 'out/link')", "not a regular file"),
        ("os.symlink('/work', 'out/folder')", "not a regular file"),
        ("os.link('out/good.txt', 'out/again')", "hard link"),
        ("os.mkfifo('out/pipe')", "not a regular file"),
        ("import socket; socket.socket(socket.AF_UNIX).bind('out/sock')", "not a regular file"),
        ("os.truncate(os.open('out/sparse', os.O_CREAT | os.O_WRONLY), 90_000)", "sparse"),
        ("os.makedirs('out/' + 'd/' * 30)", "deeper"),
        ("open('out/new\\nline', 'w')", "unprintable"),
        ("open('out/\\x1b[31m', 'w')", "unprintable"),
        ("open(b'out/\\xff', 'w')", "unprintable|unreadable"),
        ("[open(f'out/{n}', 'w').close() for n in range(20_000)]", "more than 16 files"),
        ("[os.mkdir(f'out/d{n}') for n in range(2_000)]", "more than 16 folders"),
        ("open('out/big', 'w').write('x' * 200_000)", "more than 100000 bytes"),
        ("os.chmod('out/good.txt', 0)", "unreadable"),
    ],
)
async def test_one_trick_voids_the_set(sandbox, trick, reason):
    result = await sandbox.run(code=GOOD + trick, limits=LIMITS)
    assert result.outcome is Outcome.OK, result
    assert result.artifacts == {}
    assert any(part in result.artifacts_refused for part in reason.split("|")), result


async def test_a_run_that_was_cut_off_has_no_artefacts(sandbox):
    result = await sandbox.run(code=GOOD + "os.abort()", limits=LIMITS)
    assert (result.artifacts, result.artifacts_refused) == ({}, "the run did not end by itself")


EMPTY = {"status": 0, "problem": "", "artifacts": [], "refused": "", "changed": [], "gone": [], "layer_refused": ""}


def report(data: bytes = b"", **header) -> bytes:
    return json.dumps(EMPTY | header).encode() + b"\n" + data


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"{}\n",
        b"[" * 100_000,
        report(status=True),
        report(status=None),
        report(status=2**70),
        report(status=-(2**70)),
        report(status=256),
        report(refused="\ud800", artifacts=[["\ud800", 0]]),
        report(problem=7),
        report(gone=7),
        report(gone=[None]),
        report(artifacts=7),
        report(changed=[["a"]]),
        report(b"xx", artifacts=[["a", 5]]),
        report(b"", artifacts=[["a", -1], ["b", 1]]),
        report(b"x", artifacts=[["../a", 1]]),
        report(b"x", artifacts=[["/a", 1]]),
        report(b"x", artifacts=[["a/../../b", 1]]),
        report(b"xx", artifacts=[["a", 1], ["a", 1]]),
        report(b"x", artifacts=[["a\0", 1]]),
        report(b"x", artifacts=[["", 1]]),
        report(b"x" * 200_000, artifacts=[["a", 200_000]]),
    ],
)
def test_forged_reports_give_nothing(forged):
    read = read_report(forged, LIMITS, {}, None)
    msgspec.msgpack.encode([read.status, read.problem, read.refused, read.layer_refused])  # it is sent on
    assert read.artifacts == read.changes == {}
    assert read.refused


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (report(b"x", changed=[["../a", 1]]), "plain relative path"),
        (report(b"x", changed=[["/a", 1]]), "plain relative path"),
        (report(b"x", changed=[["a\n", 1]]), "plain relative path"),
        (report(b"xx", changed=[["a", 1], ["a/b", 1]]), "a file and a folder"),
        (report(b"x", changed=[["here/b", 1]]), "a file and a folder"),
        (report(b"xx", changed=[["a", 1], ["a", 1]]), "there twice"),
        (report(b"x", changed=[["a", 1]], gone=["a"]), "there twice"),
        (report(changed=[[f"f{n}", 0] for n in range(2000)]), "at most 1024"),
        (report(layer_refused="a fifo"), "a fifo"),
        (report(changed=[["\ud800", 0]]), "plain relative path"),
    ],
)
def test_forged_layers_are_refused_whole(forged, reason):
    read = read_report(forged, LIMITS, {"here": b"x"}, None)
    read.layer_refused.encode()
    assert read.changes == {}
    assert reason in read.layer_refused


def test_an_honest_report_is_read():
    honest = report(b"xyzw", artifacts=[["a", 1], ["b/c", 2]], changed=[["new", 1]], gone=["old"])
    read = read_report(honest, RunLimits(artifact_bytes=MIB), {"old": b"", "kept": b"k"}, None)
    assert (read.status, read.artifacts, read.refused) == (0, {"a": b"x", "b/c": b"yz"}, "")
    assert (read.changes, read.layer_refused) == ({"kept": b"k", "new": b"w"}, "")
