"""What goes into a sandbox and what comes out of it: the job, and a report that is read as hostile data."""

from __future__ import annotations

import json
import marshal
import re
import signal
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl_core.errors import SpecError
from rl_core.sandbox.protocol import Layer, Outcome, RunLimits, RunRequest
from rl_core.sandbox.snapshots import Snapshot
from rl_core.sandbox.trees import MAX_TREE_FILES, check_layer, check_names, disk_use, plain_path

MAX_FILES, MAX_SERVICES = 256, 8
_SURROGATES = re.compile("[\ud800-\udfff]")  # which are no text that can be sent on
_OWN_FOLDERS = ("out", "tmp", "repo")


def encode_job(request: RunRequest, base: Snapshot | None) -> bytes:
    """The job as the supervisor inside reads it. Raises: SpecError."""
    for argv in (request.argv, *(service.argv for service in request.services)):
        if not argv or any("\0" in word for word in argv):
            raise SpecError("argv must name a program, without NUL bytes")
    if len(request.files) > MAX_FILES or len(request.services) > MAX_SERVICES:
        raise SpecError(
            f"{len(request.files)} files, {len(request.services)} services; at most {MAX_FILES} and {MAX_SERVICES}"
        )
    check_names(request.files)
    for name in request.files:
        if name.split("/")[0] in _OWN_FOLDERS:
            raise SpecError(f"file name {name[:80]!r} must be a plain relative path outside out/, tmp/ and repo/")
    _check_room(request, base)
    limits = request.limits
    return marshal.dumps(
        {
            "argv": request.argv,
            "files": request.files,
            "layer": (request.layer or {}) if request.has_tree else None,
            "services": [msgspec.structs.asdict(service) for service in request.services],
            "artifact_files": limits.artifact_files,
            "artifact_bytes": limits.artifact_bytes,
            "layer_files": limits.layer_files,
            "layer_bytes": limits.layer_bytes,
            "max_seen": MAX_TREE_FILES + limits.layer_files,
        }
    )


def _check_room(request: RunRequest, base: Snapshot | None) -> None:
    """Whether everything that is laid out fits the disk. Raises: SpecError."""
    limits, layer, names = request.limits, request.layer or {}, base.index if base else {}
    check_layer(layer, names, max_files=limits.layer_files, max_bytes=limits.layer_bytes)
    sizes = [size for name, (_, size) in names.items() if name not in layer]
    sizes += [len(content) for content in layer.values() if content is not None]
    needed = disk_use([*sizes, *map(len, request.files.values())])
    if needed > limits.disk_bytes:
        raise SpecError(f"files that take {needed} bytes do not fit disk_bytes {limits.disk_bytes}")


@dataclass(frozen=True, slots=True)
class Report:
    """What the supervisor said, checked. `status` None: it said nothing, or nothing that holds."""

    status: int | None
    problem: str = ""  # why the command was not started
    artifacts: dict[str, bytes] = field(default_factory=dict)
    refused: str = ""
    changes: Layer = field(default_factory=dict)
    layer_refused: str = ""


def read_report(report: bytes, limits: RunLimits, start: Layer, base: Snapshot | None) -> Report:
    """The report on a run that began with a layer. It comes from the sandbox: nothing in it is believed."""
    line, _, data = report.partition(b"\n")
    try:
        header: dict[str, Any] = json.loads(line)
        status, problem = header["status"], header["problem"]
        refused, layer_refused, gone = header["refused"], header["layer_refused"], header["gone"]
        artifacts, changed = _sizes(header["artifacts"]), _sizes(header["changed"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return _nothing("the run ended without a report")
    texts = [problem, refused, layer_refused, *gone] if isinstance(gone, list) else [None]
    if type(status) not in (int, type(None)) or not all(type(text) is str for text in texts):
        return _nothing("the run's report does not add up")
    if not -64 <= (status or 0) <= 255 or any(_SURROGATES.search(text) for text in (problem, refused, layer_refused)):
        return _nothing("the run's report does not add up")
    if sum(size for _, size in (*artifacts, *changed)) != len(data) or (status is None) != bool(problem):
        return _nothing("the run's report does not add up")
    kept, refused = _artifacts(artifacts, data, limits) if not refused else ({}, refused)
    changes: Layer = dict.fromkeys(gone)
    offset = sum(size for _, size in artifacts)
    for name, size in changed:
        if name in changes:
            layer_refused = layer_refused or "a file is there twice"
        changes[name] = data[offset : offset + size]
        offset += size
    if not layer_refused:
        changes, layer_refused = _layer(changes, start, limits, base)
    return Report(status, problem[:4000], kept, refused[:200], {} if layer_refused else changes, layer_refused[:200])


def _nothing(reason: str) -> Report:
    return Report(None, refused=reason, layer_refused=reason)


def _sizes(pairs: Any) -> list[tuple[str, int]]:
    """Raises: TypeError, ValueError."""
    sizes = [(name, size) for name, size in pairs]
    if not all(type(name) is str and type(size) is int and size >= 0 for name, size in sizes):
        raise TypeError("neither a name nor a size")
    return sizes


def _artifacts(sizes: list[tuple[str, int]], data: bytes, limits: RunLimits) -> tuple[dict[str, bytes], str]:
    artifacts: dict[str, bytes] = {}
    offset = 0
    for name, size in sizes:
        if not plain_path(name) or name in artifacts:
            return {}, "an artefact's name is not a plain relative path"
        artifacts[name] = data[offset : offset + size]
        offset += size
    if len(artifacts) > limits.artifact_files or offset > limits.artifact_bytes:
        return {}, "more artefacts than allowed"
    return artifacts, ""


def _layer(changes: Layer, start: Layer, limits: RunLimits, base: Snapshot | None) -> tuple[Layer, str]:
    """All that differs from the base: the layer before, with the changes over it; or why it is void."""
    merged = {**start, **changes}
    layer = {name: merged[name] for name in sorted(merged) if not _same(base, name, merged[name])}
    try:
        check_layer(layer, base.index if base else (), max_files=limits.layer_files, max_bytes=limits.layer_bytes)
    except SpecError as error:
        return {}, str(error)
    return layer, ""


def _same(base: Snapshot | None, name: str, content: bytes | None) -> bool:
    """Whether the base has just this."""
    if base is None or name not in base.index:
        return content is None
    return content is not None and len(content) == base.index[name][1] and base.read(name) == content


def outcome_of(report: Report, *, oom: bool, timed_out: bool, overflowed: bool) -> Outcome:
    """How a run ended, the strongest reason first."""
    if overflowed:
        return Outcome.OUTPUT_LIMIT
    if timed_out or report.status == -signal.SIGXCPU:
        return Outcome.TIMEOUT
    if oom:
        return Outcome.MEMORY
    if report.problem:
        return Outcome.SERVICE
    if report.status is None or report.status < 0:
        return Outcome.KILLED
    return Outcome.OK
