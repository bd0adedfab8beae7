"""What a repository depends on, as wheels: named in its files, fetched outside as data, unpacked inside a world.

Nothing of the repository or of a package is run to find out: its files are parsed, pip is told to fetch wheels only,
and what has none is refused. `setup.py` is never run, not even inside.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from rl_core.errors import BuildRefused
from rl_core.sandbox.protocol import MIB

RUNNER = "pytest"
MAX_WHEELS = 100
MAX_WHEELS_BYTES = 48 * MIB
DOWNLOAD_S = 300.0
_GROUPS = ("test", "tests", "testing", "dev")
_LISTS = ("requirements.txt", "requirements-test.txt", "requirements-dev.txt", "test-requirements.txt")


def requirements_of(tree: Mapping[str, bytes]) -> list[str]:
    """What `pyproject.toml` and the usual lists name, and the runner of tests; sorted, each once.

    Raises: BuildRefused for a line that is no plain requirement: options, addresses and paths lead elsewhere.
    """
    lines = [line for name in _LISTS if name in tree for line in _list_lines(tree[name], name)]
    lines += _project_lines(tree.get("pyproject.toml", b""))
    return sorted({_plain(line) for line in lines} | {RUNNER})


def download(requirements: Iterable[str]) -> dict[str, bytes]:
    """The wheels of requirements and of what they require, by file name. Raises: BuildRefused."""
    with tempfile.TemporaryDirectory(prefix="slipway-wheels-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", folder, "--", *requirements]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=DOWNLOAD_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise BuildRefused(f"its dependencies did not come within {DOWNLOAD_S:g} s") from error
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise BuildRefused(f"its dependencies cannot be had as wheels: {said[-1][:300] if said else 'pip failed'}")
        paths = sorted(Path(folder).glob("*.whl"))
        size = sum(path.stat().st_size for path in paths)
        if len(paths) > MAX_WHEELS or size > MAX_WHEELS_BYTES:
            raise BuildRefused(
                f"its dependencies are {len(paths)} wheels of {size // MIB} MiB; at most {MAX_WHEELS} of "
                f"{MAX_WHEELS_BYTES // MIB} MiB"
            )
        return {path.name: path.read_bytes() for path in paths}


def _list_lines(content: bytes, name: str) -> list[str]:
    lines = [line.split(" #")[0].strip() for line in content.decode(errors="replace").splitlines()]
    options = [line for line in lines if line.startswith("-")]
    if options:
        raise BuildRefused(f"{name} has the option {options[0][:80]!r}; name packages alone")
    return [line for line in lines if line and not line.startswith("#")]


def _project_lines(content: bytes) -> list[str]:
    try:
        read = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BuildRefused(f"pyproject.toml cannot be read: {error}") from error
    project, groups = _table(read.get("project")), _table(read.get("dependency-groups"))
    optional = _table(project.get("optional-dependencies"))
    found = [project.get("dependencies"), *(source.get(name) for source in (optional, groups) for name in _GROUPS)]
    return [line for lines in found if isinstance(lines, list) for line in lines if isinstance(line, str)]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(line: str) -> str:
    try:
        requirement = Requirement(line)
    except InvalidRequirement as error:
        raise BuildRefused(f"{line[:80]!r} is no plain requirement") from error
    if requirement.url:
        raise BuildRefused(f"{line[:80]!r} names an address; name a version")
    return str(requirement)
