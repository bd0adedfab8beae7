"""What goes into a sandbox and what comes out of it: the job, and a report that is read as hostile data."""

from __future__ import annotations

import json
import marshal
import signal
from pathlib import PurePosixPath
from typing import Any

from rl_core.errors import SpecError
from rl_core.sandbox.protocol import Outcome, RunLimits, RunRequest

MAX_FILES = 256


def encode_job(request: RunRequest, *, landlock: bool) -> bytes:
    """The job as the supervisor inside reads it. Raises: SpecError."""
    if not request.argv or any("\0" in word for word in request.argv):
        raise SpecError("argv must name a program, without NUL bytes")
    if len(request.files) > MAX_FILES:
        raise SpecError(f"{len(request.files)} files; at most {MAX_FILES}")
    size = sum(map(len, request.files.values()))
    if size > request.limits.disk_bytes:
        raise SpecError(f"files of {size} bytes do not fit disk_bytes {request.limits.disk_bytes}")
    for name in request.files:
        if not _plain_path(name) or name.split("/")[0] in ("out", "tmp"):
            raise SpecError(f"file name {name[:80]!r} must be a plain relative path outside out/ and tmp/")
    return marshal.dumps(
        {
            "argv": request.argv,
            "files": request.files,
            "landlock": landlock,
            "artifact_files": request.limits.artifact_files,
            "artifact_bytes": request.limits.artifact_bytes,
        }
    )


def _plain_path(name: str) -> bool:
    path = PurePosixPath(name)
    plain = name.isprintable() and len(name) <= 240 and str(path) == name and name != "."
    return plain and not path.is_absolute() and ".." not in path.parts


def read_report(report: bytes, limits: RunLimits) -> tuple[int | None, dict[str, bytes], str]:
    """Exit code, artefacts, and why they are void. The report comes from the sandbox: nothing in it is believed."""
    line, _, data = report.partition(b"\n")
    try:
        header: dict[str, Any] = json.loads(line)
        status, sizes, refused = header["status"], header["artifacts"], header["refused"]
        valid = type(status) is int and type(refused) is str
        pairs = [(name, size) for name, size in sizes if type(name) is str and type(size) is int and size >= 0]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, {}, "the run ended without a report"
    if not valid or len(pairs) != len(sizes) or sum(size for _, size in pairs) != len(data):
        return None, {}, "the run's report does not add up"
    if refused:
        return status, {}, refused[:200]
    if len(pairs) > limits.artifact_files or len(data) > limits.artifact_bytes:
        return status, {}, "more artefacts than allowed"
    artifacts: dict[str, bytes] = {}
    offset = 0
    for name, size in pairs:
        if not _plain_path(name) or name in artifacts:
            return status, {}, "an artefact's name is not a plain relative path"
        artifacts[name] = data[offset : offset + size]
        offset += size
    return status, artifacts, ""


def outcome_of(status: int | None, *, oom: bool, timed_out: bool, overflowed: bool) -> Outcome:
    """How a run ended, the strongest reason first."""
    if overflowed:
        return Outcome.OUTPUT_LIMIT
    if timed_out or status == -signal.SIGXCPU:
        return Outcome.TIMEOUT
    if oom:
        return Outcome.MEMORY
    if status is None or status < 0:
        return Outcome.KILLED
    return Outcome.OK
