"""What `manage.py doctor` looks at: each check says whether it is well and, if not, what to do."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from django.conf import settings
from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from packaging.requirements import Requirement

from controlplane.processes.errors import PortTaken
from controlplane.processes.seed import DENSE
from controlplane.processes.services import services_status
from controlplane.processes.stack import choose_web_port, sandbox_refusal, state_writable

NEEDED_GB = 8
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Grade(StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"  # something optional is missing
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    grade: Grade
    text: str


def diagnose() -> Iterator[Finding]:
    """Every check in turn; none of them changes anything that matters."""
    for what, check in CHECKS.items():
        grade, text = check()
        yield Finding(what, grade, text)


_Result = tuple[Grade, str]


def _python() -> _Result:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.prefix == sys.base_prefix:
        return Grade.WARN, f"{version} outside of a virtual environment; use: .venv/bin/python manage.py (make setup)"
    return Grade.OK, version


def _packages() -> _Result:
    missing = []
    for line in importlib.metadata.requires("slipway") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            missing.append(f"{requirement.name} ({found} does not fit {requirement.specifier})")
    if missing:
        return Grade.FAIL, f"missing: {', '.join(missing)}; run: make setup"
    return Grade.OK, "all there"


def _torch() -> _Result:
    code = "import torch; print(torch.__version__, (torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2, "
    code += "dtype=torch.bfloat16)).sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0 or not done.stdout.strip().endswith("8.0"):
        reason = (done.stderr.strip().splitlines() or ["it computes wrongly"])[-1]
        return Grade.FAIL, f"torch does not work: {reason}; run: make setup"
    return Grade.OK, f"torch {done.stdout.split()[0]}"


def _disk() -> _Result:
    try:
        state_writable(settings.STATE_DIR)
    except OSError as error:
        return Grade.FAIL, f"{settings.STATE_DIR} cannot be written: {error}; free space, or set SLIPWAY_STATE"
    free = shutil.disk_usage(settings.STATE_DIR).free / 1e9
    text = f"{free:.0f} GB free for {settings.STATE_DIR}"
    if free < 1:
        return Grade.FAIL, f"{text}; free some space"
    return (Grade.OK, text) if free >= NEEDED_GB else (Grade.WARN, f"{text}; a run may need up to {NEEDED_GB} GB")


def _ports() -> _Result:
    try:
        return Grade.OK, f"web would listen on {choose_web_port(None)}"
    except PortTaken as error:
        return Grade.FAIL, str(error)


def _services() -> _Result:
    if not settings.EMBEDDED:
        return Grade.OK, "named by DATABASE_URL and REDIS_URL"
    stopped = [service.name for service in services_status(settings.STATE_DIR) if service.pid is None]
    if stopped:
        return Grade.WARN, f"{', '.join(stopped)} stopped; `make up` starts them, or: manage.py services start"
    return Grade.OK, "PostgreSQL and Valkey run"


def _tables() -> _Result:
    try:
        executor = MigrationExecutor(connection)
        open_count = len(executor.migration_plan(executor.loader.graph.leaf_nodes()))
    except Error:
        return Grade.WARN, "the database does not answer; start it: manage.py services start"
    if open_count:
        return Grade.WARN, f"{open_count} migrations to apply; `make up` does, or: manage.py migrate"
    return Grade.OK, "up to date"


def _model() -> _Result:
    folder = settings.STATE_DIR / "models" / DENSE
    if (folder / "model.safetensors").is_file():
        return Grade.OK, str(folder)
    return Grade.WARN, f"not converted yet; run: python -m rl_core.models convert --out {folder}"


def _sandbox() -> _Result:
    refusal = sandbox_refusal()
    return (Grade.WARN, f"code repair is refused here: {refusal}") if refusal else (Grade.OK, "every layer is there")


def _browser() -> _Result:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        return Grade.WARN, "no Chromium, so browser tests skip; apt-get install chromium"
    return Grade.OK, found


CHECKS: dict[str, Callable[[], _Result]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "disk": _disk,
    "ports": _ports,
    "services": _services,
    "tables": _tables,
    "model": _model,
    "sandbox": _sandbox,
    "browser": _browser,
}
