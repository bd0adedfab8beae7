"""Environments of repositories: read as data, dependencies as wheels, tests run five times, hostile ones refused."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from rl_core.environments import proof as proofs
from rl_core.environments.bug_repair import call_text, open_world
from rl_core.environments.bug_repair.proving import proof
from rl_core.environments.patch import PATCH
from rl_core.environments.proof import ProofVerdict
from rl_core.environments.repository import __main__ as command
from rl_core.environments.repository import building, reading
from rl_core.environments.repository.building import Outcomes, build, install
from rl_core.environments.repository.reading import read_folder
from rl_core.environments.repository.tasking import hidden_ids, make_task
from rl_core.environments.repository.wheels import download, requirements_of
from rl_core.environments.tasks import TaskSet, parse_task_set
from rl_core.errors import BuildRefused, TaskSetError
from rl_core.sandbox.trees import encode_tree
from rl_core.types import Split
from tests.rl_core.environments.criteria.grading_rig import PYTEST, package_tree, said, scored


def wheel(name: str, files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return packed.getvalue()


GREETING = wheel(
    "greeting",
    {
        "greeting.py": b"def greet(name):\n    return 'hello ' + name\n",
        "greeting-1.0.data/purelib/farewell.py": b"BYE = 'bye'\n",
        "greeting-1.0.data/scripts/greet": b"#!/bin/sh\n",
        "../outside.py": b"",
    },
)


@pytest.fixture(scope="module")
def fetch():
    """Wheels without an index: pytest as it is installed here, and one of our own."""
    runner = {path.removeprefix("w/"): content for path, content in package_tree("w", *PYTEST).items()}
    wheels = {"greeting-1.0-py3-none-any.whl": GREETING, "pytest-1.0-py3-none-any.whl": wheel("runner", runner)}
    asked: list[list[str]] = []

    def take(requirements):
        asked.append(list(requirements))
        return {name: content for name, content in wheels.items() if "greeting" in requirements or "pytest" in name}

    take.asked = asked
    return take


FILES = {
    "requirements.txt": "# what it needs\ngreeting  # by name\n",
    "src/shop.py": "from greeting import greet\n\n\ndef welcome(name):\n    return greet(name).upper()\n",
    "tests/test_shop.py": (
        "import random\n\nimport farewell\nimport pytest\nfrom shop import welcome\n\n\n"
        "def test_welcome():\n    assert welcome('ann') == 'HELLO ANN'\n\n\n"
        "def test_wrong():\n    assert welcome('bo') == 'BYE BO'\n\n\n"
        "@pytest.mark.parametrize('coin', range(4))\n"
        "def test_sometimes(coin):\n    assert random.SystemRandom().random() < 0.5\n"
    ),
}


def written(folder: Path, files) -> Path:
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


async def test_a_repository_becomes_a_working_environment(sandbox, tmp_path, fetch):
    tree = read_folder(written(tmp_path / "repo", FILES))
    built, installed = await build(sandbox, tree, fetch=fetch)
    assert fetch.asked[-1] == ["greeting", "pytest"]
    assert "tests/test_shop.py::test_welcome" in built.tests.passing
    assert "tests/test_shop.py::test_wrong" in built.tests.failing
    # Four coins, thrown five times each: all of them fall alike in one of 65,536 builds.
    assert built.tests.flaky
    assert {test.split("[")[0] for test in built.tests.flaky} == {"tests/test_shop.py::test_sometimes"}
    assert built.packages == ("src", ".packages")
    assert installed.tree[".packages/greeting.py"]
    assert installed.tree[".packages/farewell.py"]
    assert not [path for path in installed.tree if "outside" in path or "scripts" in path]
    assert built.snapshot == await sandbox.freeze(installed.tree)
    assert built.wheels == ("greeting-1.0-py3-none-any.whl", "pytest-1.0-py3-none-any.whl")
    assert (await install(sandbox, tree, fetch=fetch)).tree == installed.tree


HOSTILE = {
    "requirements.txt": "",
    "setup.py": "open('{mark}', 'w').write('ran')\n",
    "conftest.py": "import os\ntry:\n    open('{mark}', 'w').write('ran')\nexcept OSError:\n    pass\n",
    "test_good.py": "def test_good():\n    pass\n",
    "test_loud.py": (
        "import sys\n\n\ndef test_loud():\n    for _ in range(1000):\n"
        "        sys.__stderr__.write('x' * 1_000_000)\n        print('y' * 1_000_000)\n"
        "        import os\n        os.write(2, b'z' * 1_000_000)\n"
    ),
    "test_exit.py": "import os\n\n\ndef test_exit():\n    os._exit(0)\n",
}


@pytest.mark.full
async def test_a_hostile_repository_costs_itself_alone(sandbox, tmp_path, fetch):
    mark = tmp_path / "mark"
    files = {path: text.replace("{mark}", str(mark)) for path, text in HOSTILE.items()}
    built, _ = await build(sandbox, read_folder(written(tmp_path / "repo", files)), fetch=fetch)
    assert built.tests.passing == ("test_good.py::test_good",)
    assert set(built.tests.left_out) | set(built.tests.failing) >= {"test_exit.py"}
    assert "test_loud.py::test_loud" not in built.tests.passing
    assert not mark.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: (root / "out.py").symlink_to("/etc/passwd"), "out.py is a link out"),
        (lambda root: (root / "out.py").symlink_to(root / ".." / "secret"), "out.py is a link out"),
        (lambda root: (root / "inner").symlink_to(root), "link to a folder"),
        (lambda root: (root / "lost.py").symlink_to(root / "gone"), "cannot be read"),
        (lambda root: os.mkfifo(root / "pipe"), "no regular file"),
        (lambda root: (root / "bad\nname.py").touch(), "no tree can hold"),
        (lambda root: (root / "large.bin").open("wb").truncate(reading.MAX_FILE_BYTES + 1), "larger than"),
        (lambda root: [(root / f"f{n}.py").touch() for n in range(reading.MAX_FILES + 1)], "more than"),
    ],
)
def test_folders_that_are_refused(tmp_path, make, message):
    (tmp_path / "secret").write_text("s")
    root = written(tmp_path / "repo", {"a.py": ""})
    make(root)
    with pytest.raises(BuildRefused, match=message):
        read_folder(root)


def test_what_tools_left_behind_is_not_read_and_a_link_within_is_its_content(tmp_path):
    root = written(tmp_path / "repo", {"a.py": "x = 1\n", ".git/config": "", "__pycache__/a.pyc": "", "b/c.py": ""})
    (root / "b/link.py").symlink_to("../a.py")
    assert read_folder(root) == {"a.py": b"x = 1\n", "b/c.py": b"", "b/link.py": b"x = 1\n"}
    with pytest.raises(BuildRefused, match="no folder"):
        read_folder(root / "a.py")
    with pytest.raises(BuildRefused, match="no files"):
        read_folder(written(tmp_path / "empty", {".git/x": ""}))


def test_requirements_are_parsed_and_never_run():
    project = b"""[project]
dependencies = ["one>=1", 'two; python_version < "4"']
[project.optional-dependencies]
test = ["three"]
docs = ["sphinx"]
[dependency-groups]
dev = ["four==2", {include-group = "x"}]
"""
    tree = {"pyproject.toml": project, "requirements.txt": b"one>=1\n", "setup.py": b"raise SystemExit\n"}
    assert requirements_of(tree) == ["four==2", "one>=1", "pytest", "three", 'two; python_version < "4"']


@pytest.mark.parametrize(
    "line",
    [
        "-r ../../etc/passwd",
        "--index-url https://elsewhere.example",
        "-e .",
        "name @ https://elsewhere.example/x.whl",
        "git+https://elsewhere.example/x.git",
        "./local",
        "../up.whl",
    ],
)
def test_requirements_that_lead_elsewhere_are_refused(line):
    with pytest.raises(BuildRefused):
        requirements_of({"requirements.txt": f"one\n{line}\n".encode()})
    with pytest.raises(BuildRefused):
        requirements_of({"pyproject.toml": f"[project]\ndependencies = [{json.dumps(line)}]".encode()})


@contextlib.contextmanager
def index(folder: Path):
    """A package index on loopback."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *args: None
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        server.server_close()


def test_wheels_are_fetched_and_a_source_package_is_never_built(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    for name in ("greeting", "hostile"):
        (tmp_path / "simple" / name).mkdir(parents=True)
    (tmp_path / "simple/greeting/greeting-1.0-py3-none-any.whl").write_bytes(GREETING)
    (tmp_path / "simple/greeting/index.html").write_text('<a href="greeting-1.0-py3-none-any.whl">x</a>')
    with zipfile.ZipFile(tmp_path / "simple/hostile/hostile-1.0.zip", "w") as archive:
        build = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        archive.writestr("hostile-1.0/pyproject.toml", build)
        for name in ("backend.py", "setup.py"):
            archive.writestr(f"hostile-1.0/{name}", f"open({str(mark)!r}, 'w').write('ran')\n")
    (tmp_path / "simple/hostile/index.html").write_text('<a href="hostile-1.0.zip">x</a>')
    with index(tmp_path) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        assert download(["greeting"]) == {"greeting-1.0-py3-none-any.whl": GREETING}
        with pytest.raises(BuildRefused, match="cannot be had as wheels"):
            download(["greeting", "hostile"])
    assert not mark.exists()


ABOUT = {"instruction": "add adds wrongly. Repair it.", "hidden": ["tests/test_hidden.py"]}
TASK = {
    "task.json": json.dumps(ABOUT),
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
    "tests/test_hidden.py": "from calc import add\n\n\ndef test_more():\n    assert add(2, 3) == 5\n",
    "solution/calc.py": "def add(a, b):\n    return a + b\n",
}


@pytest.fixture
def twice(monkeypatch):
    """Two runs where there would be five: for tests of what comes of them."""
    monkeypatch.setattr(building, "RUNS", 2)
    monkeypatch.setattr(proofs, "RUNS", 2)


async def test_a_folder_of_repositories_becomes_a_task_set(sandbox, tmp_path, fetch, twice):
    task, frozen = await make_task(sandbox, written(tmp_path / "adder", TASK), fetch=fetch)
    assert parse_task_set(TaskSet((task,)).to_jsonl()).tasks == (task,)
    assert (task.id, task.split) == ("adder", Split.TRAIN)
    assert set(task.input["files"]) == {"calc.py", "tests/test_calc.py"}
    assert task.input["snapshot"] == encode_tree(frozen)[0]
    assert "tests/test_hidden.py" not in frozen
    wanted = task.reference["unit_tests"]
    assert wanted["ids"] == ["tests/test_calc.py::test_zero", "tests/test_hidden.py::test_more"]
    assert wanted["hidden"] == ["tests/test_hidden.py::test_more"]

    assert (await proof(sandbox, task)).verdict is ProofVerdict.HOLDS
    with pytest.raises(TaskSetError, match=r"reference\.repair"):
        await proof(sandbox, msgspec.structs.replace(task, reference={"unit_tests": wanted}))

    # Played in the environment of bug repair, graded by the task's own tests.
    world = open_world(sandbox)
    state = await world.open(task=task, key="k")

    async def graded(state):
        artifacts = await world.export(task=task, state=state)
        given = {"task": task, "sandbox": sandbox}
        score = await scored("unit_tests", {}, said("x", artifacts=artifacts), **given)
        gap = await scored("test_gap", {"oracle": "unit_tests"}, said("x", artifacts=artifacts), **given)
        return score.value, gap.value

    run = {"command": 'python3 -c \'import os; print(os.path.exists("tests/test_hidden.py"), os.listdir("."))\''}
    result = await world.call(task=task, tool="run", arguments=run, state=state, step="1")
    assert result.text.startswith("False [")
    assert ".packages" in result.text
    assert await graded(state) == (0.0, 1.0)
    edit = {"path": "calc.py", "old": "a - b", "new": "a + b"}
    after = (await world.call(task=task, tool="edit", arguments=edit, state=state, step="2")).state
    assert await graded(after) == (1.0, 0.0)
    assert PATCH in await world.export(task=task, state=after)
    assert "calc.py" in call_text("edit", **edit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.json": None}, "has no task.json"),
        ({"task.json": "{}"}, "instruction"),
        ({"task.json": json.dumps({**ABOUT, "hidden": ["tests/test_gone.py"]})}, "no tests/test_gone.py"),
        ({"solution/calc.py": None}, "no solution"),
    ],
)
async def test_folders_that_are_no_task(sandbox, tmp_path, fetch, changes, message):
    files = {path: text for path, text in {**TASK, **changes}.items() if text is not None}
    with pytest.raises(BuildRefused, match=message):
        await make_task(sandbox, written(tmp_path / "adder", files), fetch=fetch)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (["a::x", "h::y"], ["a::x", "h::y"], "pass before the repair"),
        (["a::x"], ["h::y"], "breaks a::x"),
        (["a::x"], ["a::x"], "no hidden test passes"),
    ],
)
def test_outcomes_that_prove_no_task(before, after, message):
    def outcomes(passing):
        return Outcomes(passing=tuple(passing), failing=(), flaky=(), seconds=1.0)

    with pytest.raises(BuildRefused, match=message):
        hidden_ids(outcomes(before), outcomes(after), ("h",))
    flaky_before = msgspec.structs.replace(outcomes([]), flaky=("h::y",))
    with pytest.raises(BuildRefused, match="pass before"):
        hidden_ids(flaky_before, outcomes(["h::y"]), ("h",))
    assert hidden_ids(outcomes(["a::x"]), outcomes(["a::x", "h::y", "h::z"]), ("h",)) == ["h::y", "h::z"]


def test_the_command(tmp_path, capsys, monkeypatch, sandbox, fetch, twice):
    monkeypatch.setattr(command, "build", functools.partial(build, fetch=fetch))
    out = tmp_path / "built.json"

    def run(files, socket=sandbox._path):
        source = written(tmp_path / str(len(list(tmp_path.iterdir()))), files)
        return command.main(["--source", str(source), "--out", str(out), "--socket", str(socket)])

    assert run({"a.py": "", "requirements.txt": "-e .\n"}) == 1
    assert "has the option" in capsys.readouterr().err
    assert run({"task/task.json": "{}"}) == 1
    assert "instruction" in json.loads(capsys.readouterr().out)["refused"]["task"]
    assert run({"test_a.py": "def test_a():\n    pass\n"}, socket=tmp_path / "none") == 3
    assert "sandboxd does not answer" in capsys.readouterr().err
    assert not out.exists()
    assert run({"test_a.py": "def test_a():\n    pass\n"}) == 0
    assert "1 pass, 0 fail, 0 flaky" in capsys.readouterr().out
    built = json.loads(out.read_text())
    assert built["tests"]["passing"] == ["test_a.py::test_a"]
    [tree] = (tmp_path / "built.json.trees").iterdir()
    assert tree.name == built["snapshot"]
    assert command.main(["--freeze", str(tree), "--socket", str(sandbox._path)]) == 0
    assert capsys.readouterr().out == f"{tree.name}\n"
    tree.write_bytes(tree.read_bytes()[:-1])
    assert command.main(["--freeze", str(tree), "--socket", str(sandbox._path)]) == 1
    assert "does not add up" in capsys.readouterr().err
