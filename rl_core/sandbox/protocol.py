"""What is said between sandboxd and those who ask it to run something. MessagePack bodies over a unix socket."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from rl_core.errors import SpecError

MIB = 1024 * 1024


class Outcome(StrEnum):
    """How a run ended. Everything but `ok` means that a limit or a signal ended it."""

    OK = "ok"  # it ended by itself, with whatever exit code
    TIMEOUT = "timeout"  # wall or processor time
    MEMORY = "memory"  # the memory limit
    KILLED = "killed"  # a signal that was not ours, e.g. a forbidden system call
    OUTPUT_LIMIT = "output_limit"  # it wrote more than it may


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one run. `disk_bytes` is the size of its writable tmpfs, which counts as memory too."""

    wall_s: float = 5.0
    cpu_s: int = 3
    memory_bytes: int = 256 * MIB
    pids: int = 64
    disk_bytes: int = 16 * MIB
    output_bytes: int = 64 * 1024
    artifact_files: int = 64
    artifact_bytes: int = 1 * MIB

    def __post_init__(self) -> None:
        bounds = {
            "wall_s": (0.1, 600.0),
            "cpu_s": (1, 600),
            "memory_bytes": (16 * MIB, 8192 * MIB),
            "pids": (4, 1024),
            "disk_bytes": (64 * 1024, 2048 * MIB),
            "output_bytes": (0, 16 * MIB),
            "artifact_files": (0, 1024),
            "artifact_bytes": (0, 64 * MIB),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise SpecError(f"limit {name} must be in [{low}, {high}], not {getattr(self, name)}")


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command in a fresh sandbox. `files` are placed, read-only, in its working directory's `in/`.

    `argv[0]` `python3` is the sandbox's own Python. What the run leaves under `/work/out` comes back as artefacts.
    """

    argv: list[str]
    files: dict[str, bytes] = {}
    stdin: bytes = b""
    limits: RunLimits = RunLimits()


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended and what it left. `artifacts_refused` says why the whole set was void, if it was."""

    outcome: Outcome
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    artifacts: dict[str, bytes] = {}
    artifacts_refused: str = ""


class Sandbox(Protocol):
    """Anything that runs a command in a fresh sandbox: the client of sandboxd, or another backend."""

    async def run(
        self,
        argv: list[str] | None = None,
        *,
        code: str | None = None,
        files: dict[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: RunLimits | None = None,
    ) -> RunResult:
        """Run a command, or Python `code`. Raises: WorldError, SandboxRefused, SpecError."""
        ...
