"""Repair tasks made by mutation: each is proven in the sandbox, and what cannot be proven is refused."""

import asyncio
import builtins
from dataclasses import replace

import msgspec
import pytest

from rl_core.environments.mutation import __main__ as command
from rl_core.environments.mutation.calls import Call
from rl_core.environments.mutation.calls import Test as Check
from rl_core.environments.mutation.drafts import TEST_FILE, draft
from rl_core.environments.mutation.grading import judge_repair
from rl_core.environments.mutation.making import make
from rl_core.environments.mutation.operators import Edit, Kind
from rl_core.environments.mutation.probe import Probed, probe
from rl_core.environments.mutation.proving import prove
from rl_core.environments.mutation.screening import Mutant, Screen
from rl_core.environments.mutation.sources import Source, find_sources
from rl_core.environments.mutation.worlds import Subject, Worlds
from rl_core.environments.tasks import parse_task_set
from rl_core.errors import TaskSetError
from rl_core.types import Split

SHOP = '''"""A small shop."""
import builtins
builtins.shop_was_imported = True


def total(prices, discount=0):
    """The sum of prices, less a discount; never below zero."""
    result = 0
    for price in prices:
        result = result + price
    if result < discount:
        return 0
    return result - discount


def label(name):
    """A name in a tag of its own."""
    return f"{name}-{hash(name)}"
'''


def shop(text=SHOP):
    return Source("shop", "here", "MIT", {"shop.py": text}, {"shop": "shop.py"})


def check(name, args, expected):
    return Check(call=Call(module="shop", name=name, args=args), expected=expected)


TESTS = [check("total", [["list", prices]], {"value": sum(prices)}) for prices in ([1, 2], [5], [2, 2, 2], [])]


def a_draft(old, new, tests=TESTS, failing=(0, 1, 2), source=None):
    """A draft whose tests are said to fail, whether or not they do."""
    source = source or shop()
    probed = Probed(source, tests=tests, lines=[frozenset({("shop.py", 9)})] * len(tests))
    edit = Edit(Kind.OPERATOR, 9, source.files["shop.py"].index(old), old, new)
    passing = tuple(n for n in range(len(tests)) if n not in failing)
    return draft(Mutant(probed, "shop.py", edit, failing, passing))


@pytest.fixture
def worlds(sandbox):
    return Worlds(sandbox)


@pytest.fixture(scope="module")
def task():
    return a_draft("result + price", "result - price").task(Split.TRAIN)


async def test_a_fault_that_tests_show_is_proven(worlds):
    assert await prove(worlds, [a_draft("result + price", "result - price")]) == [""]
    assert not hasattr(builtins, "shop_was_imported")


async def test_what_cannot_be_proven_is_refused_with_its_reason(worlds):
    labels = [check("label", [word], {"value": f"{word}-1"}) for word in "abcd"]
    clock = SHOP.replace("import builtins\n", "import builtins, time\n").replace(
        "result = 0", "result = int(time.time())"
    )
    refused = {
        "equivalent": a_draft("result < discount", "result <= discount"),
        "passes before the fix": a_draft(
            "result + price", "price", tests=[TESTS[1], *TESTS[:1], TESTS[2]], failing=(0, 1, 2)
        ),
        "flaky": a_draft('return f"{name}', 'return f"x{name}', tests=labels),
        "fails with the original": a_draft(
            "result + price", "result - price", tests=[check("total", [["list", [1]]], {"value": 7})] * 3
        ),
        "too few failing tests": a_draft(
            "result - discount", "result - len(prices) // 3", tests=TESTS, failing=(2, 0, 1)
        ),
    }
    refused["too few failing tests"] = with_visible(refused["too few failing tests"], TESTS[2])
    assert dict(zip(refused, await prove(worlds, list(refused.values())), strict=True)) == {why: why for why in refused}
    by_time = a_draft("result + price", "result - price", source=shop(clock))
    assert await prove(worlds, [by_time]) == ["flaky"]


def with_visible(given, visible):
    """The draft with another visible test, in its file too."""
    from rl_core.environments.mutation import drafts

    files = {**given.files, TEST_FILE: drafts.write_test(visible, given.source)}
    hidden = tuple(test for test in TESTS if test is not visible)
    return replace(given, visible=visible, hidden=hidden, files=files)


async def test_probing_drops_what_is_flaky_and_screening_what_nobody_notices(worlds):
    probed = await probe(worlds, shop(), seed=0)
    assert [test for test in probed.tests if test.call.name == "label" and isinstance(test.call.args[0], str)] == []
    assert "total" in {test.call.name for test in probed.tests}
    assert probed.dropped["flaky"] > 0
    screen = Screen(probed, 0)
    mutants = await screen.more(worlds, 100)
    assert mutants
    assert all(len(mutant.failing) >= 3 for mutant in mutants)
    assert screen.tried == len(mutants) + sum(screen.dropped.values())


async def test_code_that_hangs_dies_or_does_not_import_is_told_apart(worlds):
    call = Call(module="shop", name="total", args=[["list", [1]]])
    texts = {
        "hangs": SHOP.replace("result = 0", "while True: pass"),
        "dies": SHOP.replace("result = 0", "import os; os._exit(0)"),
        "broken": "import nothing_like_it\n",
        "done": SHOP,
    }
    subjects = [Subject(source=shop(), calls=[call], files={"shop.py": text}) for text in texts.values()]
    assert [reply.end for reply in await worlds.ask(subjects, run=0)] == list(texts)


async def test_the_command_makes_three_tasks_the_same_each_time(sandbox, tmp_path, capsys):
    arguments = ["--count", "3", "--sources", "colorsys,bisect,inflection", "--socket", str(sandbox._path), "--out"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        assert await asyncio.to_thread(command.main, [*arguments, str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    said = capsys.readouterr()
    assert "made 3 of 3 tasks" in said.out
    assert "dropped" in said.out
    assert "proving" in said.err
    originals = {source.name: source for source in find_sources(["colorsys", "bisect", "inflection"])}
    tasks = parse_task_set(files[0].read_bytes()).tasks
    assert len({task.reference["source"] for task in tasks}) == 3
    for task in tasks:
        solution, files_shown = task.reference["solution"], task.input["files"]
        original = originals[task.reference["source"]]
        repaired = repair_of(task)
        assert repaired[solution["file"]] == original.files[solution["file"]] != files_shown[solution["file"]]
        assert set(files_shown) == {*original.files, TEST_FILE}
        assert len(task.reference["hidden"]) >= 2
        assert not (await judge_repair(sandbox, task, {})).passed
        assert (await judge_repair(sandbox, task, repaired)).passed


def repair_of(task):
    """The perfect repair of a task."""
    solution = task.reference["solution"]
    text = task.input["files"][solution["file"]]
    edit = Edit(Kind.OPERATOR, 0, solution["offset"], solution["old"], solution["new"])
    return {solution["file"]: edit.apply(text)}


async def test_fewer_tasks_than_asked_are_said(worlds):
    made = await make(worlds, [shop()], count=50, seed=0, progress=lambda line: None)
    assert 0 < len(made.tasks.tasks) < 50


BROKEN = SHOP.replace("result + price", "result - price")
CHEATS = {
    "nothing done": ({}, 0.0),
    "only the shown case": ({"shop.py": "def total(prices, discount=0):\n    return 5\n"}, 1.0),
    "the test rewritten": ({TEST_FILE: "pass\n"}, 0.0),
    "an early exit": ({"shop.py": "import os\nos._exit(0)\n"}, 0.0),
    "an endless loop": ({"shop.py": "while True: pass\n"}, 0.0),
    "equal to everything": (
        {"shop.py": "class E(int):\n    __eq__ = lambda a, b: True\ndef total(*a): return E(5)\n"},
        0.0,
    ),
    "killing the parent": ({"shop.py": "import os\nos.kill(os.getppid(), 9)\n"}, 0.0),
    "the original by import": ({"shop.py": "from shop import *\n"}, 0.0),
    "the original by reading": ({"shop.py": "exec(open('/python/lib/x.py').read())\n"}, 0.0),
    "a way out": ({"../shop.py": SHOP}, 0.0),
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheats_do_not_pass(sandbox, task, cheat):
    repair, visible = CHEATS[cheat]
    judged = await judge_repair(sandbox, task, repair)
    assert not judged.passed
    assert judged.visible == visible
    assert judged.hidden < 1
    assert judged.first_failure.isprintable()
    assert 0 < len(judged.first_failure) <= 200


@pytest.mark.parametrize("text", [SHOP, BROKEN.replace("result - price", "sum((result, price))")])
async def test_honest_repairs_pass(sandbox, task, text):
    judged = await judge_repair(sandbox, task, {"shop.py": text})
    assert (judged.visible, judged.hidden, judged.first_failure) == (1.0, 1.0, "")


async def test_another_kind_of_task_is_refused(sandbox, task):
    for broken in (
        msgspec.structs.replace(task, reference={}),
        msgspec.structs.replace(task, input={"question": "?"}),
        msgspec.structs.replace(task, reference={**task.reference, "hidden": []}),
        msgspec.structs.replace(task, reference={**task.reference, "visible": {"call": 7}}),
    ):
        with pytest.raises(TaskSetError):
            await judge_repair(sandbox, broken, {})
