"""Criteria over the exported patch, in a real sandbox: commands, unit tests and the ways to cheat them."""

from __future__ import annotations

import pytest

from rl_core.environments.patch import PATCH
from rl_core.environments.tasks import Task
from rl_core.types import Split
from tests.rl_core.environments.criteria.grading_rig import PYTEST, package_tree, patched, said, scored

ADD = "def add(a, b):\n    return a + b\n"
BROKEN = ADD.replace("+", "-")
TEST = """from shop import add


def test_add():
    assert add(1, 2) == 3


def test_zero():
    assert add(0, 0) == 0
"""
FILES = {"shop.py": BROKEN, "tests/test_shop.py": TEST}
CHECK = {"argv": ["python3", "-c", "import sys; sys.path.insert(0, '.'); import shop; assert shop.add(1, 2) == 3"]}


async def test_a_commands_exit_code_over_the_patch(sandbox):
    async def value(files, **more):
        return await scored("command", {**CHECK, **more}, patched(files), sandbox=sandbox, files=FILES)

    assert (await value({"shop.py": ADD})).value == 1.0
    wrong = await value({})
    assert wrong.value == 0.0
    assert "exit code 1: AssertionError" in wrong.reason
    assert (await value({}, exit_code=1)).value == 1.0
    gone = await value({"shop.py": None})
    assert "ModuleNotFoundError" in gone.reason
    slow = await value({"shop.py": "import time\ntime.sleep(60)\n"}, wall_s=1)
    assert (slow.value, slow.reason) == (0.0, "the command was ended: timeout")
    # The weak kind: what is graded can end the process that grades, and say that all is well.
    assert (await value({"shop.py": "import os\nos._exit(0)\n"})).value == 1.0


async def test_what_is_no_patch_or_has_nothing_under_it_is_an_error(sandbox):
    async def error(text, **given):
        return (await scored("command", CHECK, said("x", artifacts={PATCH: text}), sandbox=sandbox, **given)).error

    assert "patch_refused" in await error("[1]", files=FILES)
    assert "patch_refused" in await error('{"../x": "y"}', files=FILES)
    assert "patch_refused" in await error('{"x": {"base64": "%"}}', files=FILES)
    assert "neither files nor a snapshot" in await error("{}")
    assert "sandbox_refused" in (await scored("command", CHECK, patched({}), files=FILES)).error


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("shop.py", 0.0),
        ("tests/test_shop.py", 1.0),
        ("tests/test_more.py", 0.0),
        ("conftest.py", 1.0),
        ("tests/conftest.py", 1.0),
        ("sitecustomize.py", 1.0),
        ("pyproject.toml", 1.0),
        ("a.pth", 1.0),
        (".pytest.ini", 1.0),
        ("pytest.toml", 1.0),
        ("tests/.pytest.toml", 1.0),
        ("contests.py", 0.0),
    ],
)
async def test_a_patch_that_touches_tests_is_noticed(path, expected):
    score = await scored("tests_touched", {}, patched({path: "x"}), files=FILES)
    assert score.value == expected


@pytest.fixture(scope="module")
def pytest_tree():
    return package_tree("lib", *PYTEST)


@pytest.fixture
async def unit_tests(sandbox, pytest_tree):
    """The score of a patch by the tests of the reference."""
    base = await sandbox.freeze({**pytest_tree, **{path: text.encode() for path, text in FILES.items()}})
    ids = ["tests/test_shop.py::test_add", "tests/test_shop.py::test_zero"]

    async def score(files, *, params=None, **reference):
        wanted = {"ids": ids, "files": {"tests/test_shop.py": TEST}, "packages": ["lib"], **reference}
        task = Task(id="t1", split=Split.TRAIN, input={"snapshot": base}, reference={"unit_tests": wanted})
        return await scored("unit_tests", params or {}, patched(files), sandbox=sandbox, task=task)

    return score


async def test_exactly_the_wanted_tests_must_pass(unit_tests):
    right = await unit_tests({"shop.py": ADD})
    assert (right.value, right.reason) == (1.0, "all 2 tests pass")
    assert (await unit_tests({})).reason == "1 of 2 tests do not pass, first tests/test_shop.py::test_add"
    gone = await unit_tests({"shop.py": ADD}, ids=["tests/test_shop.py::test_add", "tests/test_shop.py::test_gone"])
    assert (gone.value, gone.reason[:40]) == (0.0, "other tests ran than wanted: 4 missing, ")
    one = await unit_tests({}, ids=["tests/test_shop.py::test_zero"])
    assert one.value == 1.0


async def test_a_patch_that_is_in_the_way_of_the_tests_is_graded_without_that(unit_tests):
    aside = {"tests/test_shop.py": None, "tests": "a file where the folder of the tests was"}
    assert (await unit_tests({"shop.py": ADD, **aside})).value == 1.0
    assert (await unit_tests(aside)).reason == "1 of 2 tests do not pass, first tests/test_shop.py::test_add"
    below = {"tests/test_shop.py": None, "tests/test_shop.py/x.py": "a folder where a test was"}
    assert (await unit_tests({"shop.py": ADD, **below})).value == 1.0


async def test_a_policy_cannot_make_a_patch_that_is_never_graded(sandbox, pytest_tree):
    files = {**FILES, "checks/conftest.py": ""}
    base = await sandbox.freeze({**pytest_tree, **{path: text.encode() for path, text in files.items()}})
    wanted = {"ids": IDS, "files": {"tests/test_shop.py": TEST}, "packages": ["lib"]}
    task = Task(id="t1", split=Split.TRAIN, input={"snapshot": base}, reference={"unit_tests": wanted})
    clash = patched({"shop.py": ADD, "checks/conftest.py": None, "checks": "a file"})  # what runs tests stays there
    score = await scored("unit_tests", {}, clash, sandbox=sandbox, task=task)
    assert score.value == 0.0
    assert "cannot be put over" in score.reason
    broken = Task(
        id="t1", split=Split.TRAIN, input={"snapshot": base}, reference={"unit_tests": {**wanted, "files": {"/": ""}}}
    )
    assert "patch_refused" in (await scored("unit_tests", {}, patched({}), sandbox=sandbox, task=broken)).error


PASSES_ALL = (
    "import pytest\n\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"
)
IN_PROCESS = """import _pytest.python

def call(pyfuncitem):
    return True

def add(a, b):
    return 0

import gc
from _pytest.runner import CallInfo
old = CallInfo.from_call.__func__

@classmethod
def lenient(cls, func, when, reraise=None):
    if when == "call":
        func = lambda: None
    return old(cls, func, when, reraise)

CallInfo.from_call = lenient
"""
SPOOFED = """import json, os, sys
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
rows = [[test, "passed", 0.0] for test in frame.f_globals["__name__"] and {ids}]
for descriptor in range(3, 10):
    try:
        os.write(descriptor, json.dumps(rows).encode())
    except OSError:
        pass
os._exit(0)
"""
IDS = ["tests/test_shop.py::test_add", "tests/test_shop.py::test_zero"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"conftest.py": PASSES_ALL}, "do not pass"),
        ({"tests/conftest.py": PASSES_ALL}, "do not pass"),
        ({"pytest.ini": "[pytest]\naddopts = --co\n"}, "do not pass"),
        ({"tests/test_shop.py": "def test_add(): pass\ndef test_zero(): pass\n"}, "do not pass"),
        ({"shop.py": "import os\nos._exit(0)\n"}, "gave no report"),
        ({"shop.py": SPOOFED.replace("{ids}", repr(IDS))}, "other tests ran"),
        ({"shop.py": IN_PROCESS}, "must fail did not"),
        ({"shop.py": "import time\ndef add(a, b): time.sleep(60)\n"}, "ended: timeout"),
        (
            {"shop.py": "import sys\ndef add(a, b): print('x' * 2_000_000, file=sys.__stdout__)\n"},
            "ended: output_limit",
        ),
    ],
    ids=[
        "conftest",
        "conftest beside",
        "pytest.ini",
        "test rewritten",
        "early exit",
        "spoofed",
        "patched",
        "hangs",
        "loud",
    ],
)
async def test_cheats_of_unit_tests(unit_tests, files, reason):
    score = await unit_tests(files, params={"wall_s": 4 if "timeout" in reason else 30})
    assert score.value == 0.0, score
    assert reason in score.reason


async def test_tests_that_end_sooner_than_they_can_are_not_believed(unit_tests):
    assert "cannot take less than 30.00 s" in (await unit_tests({"shop.py": ADD}, seconds=300.0)).reason
    assert (await unit_tests({"shop.py": ADD}, seconds=0.4)).value == 1.0
