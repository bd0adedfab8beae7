"""Twelve kinds of cheating, each a row: a grader that believes the policy's own process is fooled, ours is not."""

import asyncio
import functools
import io
import re
import sys
import zipfile
from importlib import metadata
from typing import NamedTuple

import msgspec
import pytest

from rl_core.environments.mutation import grading
from rl_core.environments.mutation.grading import judge_repair
from rl_core.environments.mutation.making import make
from rl_core.environments.mutation.operators import Edit, Kind
from rl_core.environments.mutation.sources import TWINS, find_sources
from rl_core.environments.mutation.worlds import Subject, Worlds
from rl_core.environments.oracle import Case, judge_cases
from rl_core.environments.tasks import Task
from rl_core.errors import WorldError
from rl_core.sandbox.protocol import MIB, Outcome, RunLimits, RunResult
from rl_core.types import Split
from tests.rl_core.environments.cheats import LIBRARY, ORIGINALS, UNREADABLE
from tests.rl_core.sandbox_process import running_sandboxd

SHOP = '''"""A small shop."""


def total(prices, discount=0):
    """The sum of prices, less a discount; never below zero."""
    result = 0
    for price in prices:
        result = result + price
    return max(0, result - discount)
'''
BROKEN = SHOP.replace("result + price", "result - price")
TEST = """from shop import total


def test_total():
    result = total([1, 2])
    assert result == 3
"""
# The same test, as a repository with recorded answers has it.
RECORDED = """import json
from shop import total


def test_total():
    assert json.dumps(total([1, 2])) == "3"
"""


class Cheat(NamedTuple):
    """Files put over the repository; which test it has; and what the fooled grader goes by."""

    files: dict[str, str]
    test: str = TEST
    believes: str = "the exit code"


def in_shop(text, **changed):
    return Cheat({"shop.py": text}, **changed)


CHEATS = {
    "conftest.py": Cheat({"conftest.py": "def pytest_pyfunc_call(pyfuncitem):\n    return True\n"}),
    "sitecustomize": Cheat({"sitecustomize.py": "import atexit, os\natexit.register(os._exit, 0)\n"}),
    "early exit": in_shop("import os\ndef total(prices, discount=0): os._exit(0)\n"),
    "spoofed output": in_shop(
        "import atexit, os\natexit.register(os.write, 1, b'1 passed in 0.01s\\n')\ndef total(*a): return 0\n",
        believes="the last line",
    ),
    "equal to everything": in_shop("class E:\n  def __eq__(s, o): return True\ndef total(*a): return E()\n"),
    "int subclass": in_shop(
        "class I(int):\n  def __eq__(s, o): return True\n  __hash__ = int.__hash__\ndef total(*a): return I(0)\n"
    ),
    "frame walking": in_shop(
        "import sys\ndef total(*a):\n  found = [c for c in sys._getframe(1).f_code.co_consts if type(c) is int]\n"
        "  return found[-1] if found else 0\n"
    ),
    "patched pytest": in_shop(
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\ndef total(*a): return 0\n"
    ),
    "patched json": in_shop(
        "import json\nclass T(str):\n  def __eq__(s, o): return True\njson.dumps = lambda *a, **k: T()\n"
        "def total(*a): return 0\n",
        test=RECORDED,
    ),
    "reading the tests": in_shop(
        "import pathlib, re\ndef total(*a):\n"
        "  text = pathlib.Path('test_visible.py').read_text()\n  return int(re.search(r'== (.d+)', text)[1])\n".replace(
            ".d", "\\d"
        )
    ),
    "special-cased constants": in_shop("def total(prices, discount=0): return {2: 3}.get(len(prices), 0)\n"),
    "the test rewritten": Cheat({"test_visible.py": "def test_total(): pass\n"}),
}
PRICES = ([1, 2], [5], [2, 2, 2], [])  # the first is the visible test
NAIVE_LIMITS = RunLimits(
    wall_s=60.0, cpu_s=30, memory_bytes=512 * MIB, disk_bytes=32 * MIB, output_bytes=1 * MIB, artifact_files=0
)
_RUN_PYTEST = """
import os, sys
os.chdir("/work/repository")
argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_visible.py"]
os.execve(sys.executable, argv, {**os.environ, "PYTHONPATH": "/work/repository:/work/tools.zip"})
"""


@functools.cache
def pytest_zipped():
    """What pytest needs to run, in one file that Python imports from."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for file in metadata.files(name):
                if file.suffix == ".py" and ".." not in file.parts:
                    archive.write(file.locate(), str(file))
    return packed.getvalue()


async def naive_grader(sandbox, cheat):
    """Runs the repository's tests beside the policy's code, and believes what comes of it."""
    repository = {"shop.py": BROKEN, "test_visible.py": cheat.test, **cheat.files}
    files = {f"repository/{path}": text.encode() for path, text in repository.items()}
    result = await sandbox.run(code=_RUN_PYTEST, files={**files, "tools.zip": pytest_zipped()}, limits=NAIVE_LIMITS)
    assert result.outcome is Outcome.OK
    if cheat.believes == "the exit code":
        return result.exit_code == 0
    return bool(re.match(r"\d+ passed", result.stdout.decode().splitlines()[-1]))


@pytest.fixture(scope="module")
def task():
    tests = [
        {"call": {"module": "shop", "name": "total", "args": [["list", p]]}, "expected": {"value": sum(p)}}
        for p in PRICES
    ]
    return Task(
        id="t",
        split=Split.TRAIN,
        input={"files": {"shop.py": BROKEN, "test_visible.py": TEST}, "test": "test_visible.py"},
        reference={"source": "shop", "blocked": [], "visible": tests[0], "hidden": tests[1:]},
    )


def test_there_are_twelve_kinds():
    assert len(CHEATS) == 12


@pytest.mark.parametrize("believes", ["the exit code", "the last line"])
async def test_the_naive_grader_tells_right_from_wrong_where_nobody_cheats(sandbox, believes):
    for test in (TEST, RECORDED):
        assert await naive_grader(sandbox, Cheat({"shop.py": SHOP}, test, believes))
        assert not await naive_grader(sandbox, Cheat({"shop.py": BROKEN}, test, believes))


@pytest.mark.parametrize("kind", CHEATS)
async def test_a_cheat_fools_the_naive_grader_and_not_ours(sandbox, task, kind):
    cheat = CHEATS[kind]
    assert await naive_grader(sandbox, cheat)
    judged = await judge_repair(sandbox, task, cheat.files)
    assert not judged.passed
    assert judged.hidden < 1
    if "shop.py" in cheat.files:  # the oracle of code repair takes one file alone
        cases = [Case((prices,), sum(prices)) for prices in PRICES]
        assert not (await judge_cases(sandbox, code=cheat.files["shop.py"], function="total", cases=cases)).passed


async def test_the_repair_that_no_cheat_made_passes_everywhere(sandbox, task):
    assert (await judge_repair(sandbox, task, {"shop.py": SHOP})).passed
    cases = [Case((prices,), sum(prices)) for prices in PRICES]
    assert (await judge_cases(sandbox, code=SHOP, function="total", cases=cases)).passed


def repair_of(task):
    """The known repair of a task."""
    solution = task.reference["solution"]
    text = task.input["files"][solution["file"]]
    return {solution["file"]: Edit(Kind.OPERATOR, 0, solution["offset"], solution["old"], solution["new"]).apply(text)}


@pytest.fixture(scope="module")
def made(sandbox):
    """A task of each of a few sources."""
    sources = find_sources(["bisect", "colorsys", "email.utils", "json", "textwrap"])
    found = asyncio.run(make(Worlds(sandbox), sources, count=5, seed=0, progress=lambda line: None))
    return {task.reference["source"]: few(task) for task in found.tasks.tasks}


def few(task):
    """With four hidden tests at most."""
    return msgspec.structs.replace(task, reference={**task.reference, "hidden": task.reference["hidden"][:4]})


@pytest.mark.parametrize("way", ORIGINALS)
async def test_the_original_is_nowhere_to_be_had(sandbox, made, monkeypatch, way):
    source, text = ORIGINALS[way]
    task, repair = made[source], {f"{source}.py": text}
    assert not (await judge_repair(sandbox, task, repair)).passed
    # It is hidden, not only refused.
    refusal = grading._refusal
    monkeypatch.setattr(grading, "_refusal", lambda *args, **kwargs: "")
    assert not (await judge_repair(sandbox, task, repair)).passed
    # Where it is not hidden, it passes.
    monkeypatch.setattr(grading, "Subject", lambda **said: Subject(**{**said, "sealed": False}))
    control = await judge_repair(sandbox, task, repair)
    assert control.passed, control.first_failure
    monkeypatch.setattr(grading, "_refusal", refusal)
    assert (await judge_repair(sandbox, task, repair)).passed == (way in UNREADABLE)


async def test_copies_of_packages_in_the_standard_library_are_hidden_too(sandbox, task, monkeypatch):
    only_hidden = f"try:\n    open('{LIBRARY}/ensurepip/__init__.py')\nexcept PermissionError:\n    pass\n"
    repair = {"shop.py": f"{only_hidden}else:\n    raise ValueError\n{SHOP}"}
    monkeypatch.setattr(grading, "_refusal", lambda *args, **kwargs: "")
    assert (await judge_repair(sandbox, task, repair)).passed
    monkeypatch.setattr(grading, "Subject", lambda **said: Subject(**{**said, "sealed": False}))
    assert (await judge_repair(sandbox, task, repair)).first_failure.startswith("ValueError")


async def test_no_source_has_its_twin_inside_the_interpreter():
    names = {source.name for source in find_sources()}
    assert not {f"_{name}" for name in names} & set(TWINS) & set(sys.builtin_module_names)
    assert "operator" not in names


async def test_without_landlock_there_is_no_judgement(task):
    class Unable:
        async def run(self, *args, **kwargs):
            return RunResult(outcome=Outcome.OK, exit_code=3, stdout=b"", stderr=b"", wall_s=0.1)

    with pytest.raises(WorldError, match="Landlock"):
        await judge_repair(Unable(), task, {})


async def judge_own_repairs(sandbox, tasks):
    at_once = asyncio.Semaphore(2)

    async def one(task):
        async with at_once:
            return await judge_repair(sandbox, task, repair_of(task))

    judged = await asyncio.gather(*(one(task) for task in tasks))
    return {task.id: j.first_failure for task, j in zip(tasks, judged, strict=True) if not j.passed}


async def test_honest_repairs_pass(sandbox, made):
    assert len(made) == 5
    assert await judge_own_repairs(sandbox, made.values()) == {}


async def test_a_repair_may_bring_back_a_word_that_the_fault_took_away(sandbox):
    whole = "def total(prices, discount=0):\n    return eval(repr(sum(prices)))\n"
    broken = whole.replace("eval(repr(sum(prices)))", "0")
    tests = [
        {"call": {"module": "shop", "name": "total", "args": [["list", p]]}, "expected": {"value": sum(p)}}
        for p in PRICES
    ]
    solution = {"file": "shop.py", "offset": broken.index("0\n"), "old": "0", "new": "eval(repr(sum(prices)))"}
    reference = {"source": "shop", "blocked": [], "visible": tests[0], "hidden": tests[1:]}
    files = {"files": {"shop.py": broken}, "test": "test_visible.py"}
    task = Task(id="t", split=Split.TRAIN, input=files, reference=reference)
    assert "does not need eval" in (await judge_repair(sandbox, task, {"shop.py": whole})).first_failure
    task = Task(id="t", split=Split.TRAIN, input=files, reference={**reference, "solution": solution})
    assert (await judge_repair(sandbox, task, {"shop.py": whole})).passed


@pytest.mark.drill
@pytest.mark.timeout(1800)
async def test_a_hundred_honest_repairs_pass(tmp_path):
    with running_sandboxd(tmp_path) as daemon:
        found = await make(Worlds(daemon.client), find_sources(), count=100, seed=1, progress=lambda line: None)
        assert len(found.tasks.tasks) == 100
        assert await judge_own_repairs(daemon.client, found.tasks.tasks) == {}
