"""A task set from a folder of repositories with tests.

Each folder is a repository as the policy finds it, with a `task.json` beside its files: what to do, which test files
are hidden, and where the files of a solution lie. Every task is proven five times before it is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from rl_core.environments.repository.building import Download, Outcomes, install, observe
from rl_core.environments.repository.reading import read_folder
from rl_core.environments.repository.wheels import download
from rl_core.environments.tasks import MAX_LINE_BYTES, Task
from rl_core.errors import BuildRefused
from rl_core.sandbox.protocol import Layer, Sandbox
from rl_core.types import Split

ABOUT: Final = "task.json"


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`task.json`. `solution` is the folder whose files, put over the repository, solve the task."""

    instruction: Annotated[str, msgspec.Meta(min_length=1, max_length=8000)]
    split: Split = Split.TRAIN
    hidden: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    solution: str = "solution"


async def make_task(sandbox: Sandbox, folder: Path, *, fetch: Download = download) -> tuple[Task, dict[str, bytes]]:
    """The task of one folder, proven, and the tree that its snapshot names. Raises: BuildRefused, WorldError."""
    tree = read_folder(folder)
    about = _about(tree)
    prefix = f"{about.solution.strip('/')}/"
    solution = {path.removeprefix(prefix): text for path, text in tree.items() if path.startswith(prefix)}
    missing = [path for path in about.hidden if path not in tree]
    if missing or not solution:
        raise BuildRefused(f"it has no {missing[0]}" if missing else f"it has no solution in {prefix}")
    whole = {path: text for path, text in tree.items() if path != ABOUT and not path.startswith(prefix)}
    shown = {path: text for path, text in whole.items() if path not in about.hidden}
    installed = await install(sandbox, whole, fetch=fetch)
    with_tests = await sandbox.freeze(installed.tree)
    before = await observe(sandbox, with_tests, {}, installed.packages, files=list(whole))
    layer: Layer = dict(solution)
    after = await observe(sandbox, with_tests, layer, installed.packages, files=[*whole, *solution])
    hidden = hidden_ids(before, after, about.hidden)
    tests = {path: _text(path, whole[path]) for path in whole if _holds(path, after.passing)}
    frozen = {path: text for path, text in installed.tree.items() if path not in about.hidden}
    snapshot = await sandbox.freeze(frozen)
    task = Task(
        id=folder.name,
        split=about.split,
        input={
            "files": {path: _text(path, text) for path, text in shown.items()},
            "snapshot": snapshot,
            "instruction": about.instruction,
        },
        reference={
            "unit_tests": {
                "ids": list(after.passing),
                "files": tests,
                "hidden": hidden,
                "packages": list(installed.packages),
                "seconds": after.seconds,
            },
            "repair": {path: _text(path, text) for path, text in solution.items()},
            "flaky": list(after.flaky),
        },
    )
    size = len(msgspec.json.encode(task))
    if size > MAX_LINE_BYTES:
        raise BuildRefused(f"its files make a task of {size} bytes; at most {MAX_LINE_BYTES}")
    return task, frozen


def _about(tree: Mapping[str, bytes]) -> About:
    try:
        return msgspec.json.decode(tree[ABOUT], type=About)
    except KeyError:
        raise BuildRefused(f"it has no {ABOUT}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BuildRefused(f"{ABOUT}: {error}") from error


def hidden_ids(before: Outcomes, after: Outcomes, files: tuple[str, ...]) -> list[str]:
    """Ids of the hidden files. Raises: BuildRefused when none of them tells the solution from what there was."""
    hidden = [test for test in after.passing if test.split("::")[0] in files]
    if not hidden:
        raise BuildRefused("no hidden test passes with the solution each time")
    told = [test for test in hidden if test not in before.passing and test not in before.flaky]
    if not told:
        raise BuildRefused("its hidden tests pass before the repair")
    lost = sorted(set(before.passing) - set(after.passing))
    if lost:
        raise BuildRefused(f"the solution breaks {lost[0]}")
    return hidden


def _holds(path: str, tests: tuple[str, ...]) -> bool:
    return any(test.split("::")[0] == path for test in tests)


def _text(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BuildRefused(f"{path} is no text; a task's files are texts") from error


def summary(made: list[Task], refused: Mapping[str, str]) -> dict[str, Any]:
    """What came of a folder of repositories, for people and machines."""
    tests = [task.reference["unit_tests"] for task in made]
    return {
        "tasks": len(made),
        "splits": {split.value: sum(task.split is split for task in made) for split in Split},
        "tests": sum(len(one["ids"]) for one in tests),
        "hidden_tests": sum(len(one["hidden"]) for one in tests),
        "refused": dict(refused),
    }


def shown(found: dict[str, Any]) -> str:
    """As JSON, a key a line."""
    return json.dumps(found, indent=2, ensure_ascii=False)
