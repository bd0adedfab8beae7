"""What is said between sandboxd and those who ask it to run something. MessagePack bodies over a unix socket."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from rl_core.errors import SpecError, WorldError

MIB = 1024 * 1024

Layer = dict[str, bytes | None]
"""What differs from a base tree: contents by path, None for deleted. Paths are normalised, relative, printable."""


class SnapshotMissing(WorldError):
    """No such snapshot is kept here, or not any more. Freeze its tree again."""

    code = "sandbox_snapshot_missing"
    retryable = True


class Outcome(StrEnum):
    """How a run ended. Everything but `ok` means that a limit or a signal ended it."""

    OK = "ok"  # it ended by itself, with whatever exit code
    TIMEOUT = "timeout"  # wall or processor time
    MEMORY = "memory"  # the memory limit
    KILLED = "killed"  # a signal that was not ours, e.g. a forbidden system call
    OUTPUT_LIMIT = "output_limit"  # it wrote more than it may
    SERVICE = "service"  # a service did not get ready, so the command was not started; stderr says why


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one run. `disk_bytes` is the size of its writable tmpfs, which counts as memory too.

    The tree, `files`, and all that the run writes share it. `layer_files` and `layer_bytes` bound what may differ from
    the base.
    """

    wall_s: float = 5.0
    cpu_s: int = 3
    memory_bytes: int = 256 * MIB
    pids: int = 64
    disk_bytes: int = 16 * MIB
    output_bytes: int = 64 * 1024
    artifact_files: int = 64
    artifact_bytes: int = 1 * MIB
    layer_files: int = 1024
    layer_bytes: int = 16 * MIB

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
            "layer_files": (0, 10_000),
            "layer_bytes": (0, 64 * MIB),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise SpecError(f"limit {name} must be in [{low}, {high}], not {getattr(self, name)}")


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that runs in the world beside the command: started before it, stopped after it.

    `argv` starts in the run's working directory. It is ready once `ready` (a command, run again and again) ends with 0,
    or, without one, once the socket or file `ready_path` is there. `stop_signal` is sent when the command has ended,
    and SIGKILL after `stop_s` more.
    """

    argv: list[str]
    ready: list[str] = []
    ready_path: str = ""
    ready_s: float = 10.0
    stop_signal: int = int(signal.SIGTERM)
    stop_s: float = 5.0

    def __post_init__(self) -> None:
        if bool(self.ready) == bool(self.ready_path):
            raise SpecError("a service needs either ready, a command, or ready_path")
        if not 0 < self.ready_s <= 120 or not 0 <= self.stop_s <= 60 or not 1 <= self.stop_signal <= 64:
            raise SpecError("a service's ready_s must be in (0, 120], stop_s in [0, 60], stop_signal in [1, 64]")


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command in a fresh sandbox. `files` are placed in `/work`.

    `argv[0]` `python3` is the sandbox's own Python. What the run leaves under `/work/out` comes back as artefacts. With
    a `base` (a snapshot's identifier) or a `layer`, the tree that they make lies at `/work/repo`, which is the working
    directory; else that is `/work`. `client` names who asks: slots are shared evenly among clients.
    """

    argv: list[str]
    files: dict[str, bytes] = {}
    stdin: bytes = b""
    limits: RunLimits = RunLimits()
    base: str = ""
    layer: Layer | None = None
    services: list[Service] = []
    client: str = ""

    @property
    def has_tree(self) -> bool:
        """Whether the world has a tree at `/work/repo`."""
        return bool(self.base) or self.layer is not None


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended and what it left. `artifacts_refused` says why the whole set was void, if it was.

    `layer` is all that differs from the base after the run; None where the world had no tree, or where
    `layer_refused` says why what it left is no layer. The run then changed nothing: its layer before still holds.
    """

    outcome: Outcome
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    wall_s: float
    artifacts: dict[str, bytes] = {}
    artifacts_refused: str = ""
    layer: Layer | None = None
    layer_refused: str = ""


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
        base: str = "",
        layer: Layer | None = None,
        services: Sequence[Service] = (),
        client: str = "",
    ) -> RunResult:
        """Run a command, or Python `code`, over a tree if one is given; see RunRequest.

        Raises: SnapshotMissing for a `base` that is not there (any more): freeze it again. WorldError, SandboxRefused,
        SpecError.
        """
        ...

    async def freeze(self, tree: Mapping[str, bytes]) -> str:
        """Register a tree as a read-only snapshot and give its identifier for `base`; the same tree, the same one.

        Raises: SpecError for a tree with odd names or past its bounds, WorldError.
        """
        ...
