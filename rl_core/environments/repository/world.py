"""The world of a repository: its state is the layer over the task's files, and how often the user was asked.

Files are read and edited as data in this process; only commands run in a sandbox, over the same base and layer. What
graders get is the artefact `PATCH` (see `rl_core.environments.patch`), with a diff and counts for people to read.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from rl_core.environments.patch import PATCH, SNAPSHOT, encode_patch
from rl_core.environments.repository.changes import unified_diff
from rl_core.environments.repository.tools import ASK, FILE_TOOLS, GREP, RUN, SUBMIT
from rl_core.environments.repository.tree import MAX_LAYER_BYTES, MAX_LAYER_FILES, ToolProblem, Tree
from rl_core.environments.tasks import Task
from rl_core.environments.world import ToolResult
from rl_core.errors import SpecError, TaskSetError, WorldError
from rl_core.sandbox.protocol import (
    MIB,
    Layer,
    Outcome,
    RunLimits,
    RunResult,
    Sandbox,
    Service,
    SnapshotMissing,
)
from rl_core.sandbox.trees import check_names

DIFF = "diff"
QUESTIONS = "questions"
NO_ANSWER = "(no answer)"
MAX_RESULT_CHARS = 8000
MAX_COMMAND_CHARS = 4000
MIN_COMMAND_S = 0.1
COMMAND_LIMITS = RunLimits(
    wall_s=30.0, cpu_s=30, disk_bytes=64 * MIB, layer_files=MAX_LAYER_FILES, layer_bytes=MAX_LAYER_BYTES
)
_KEPT_BASES = 64

LoadFiles = Callable[[Task], Awaitable[Mapping[str, bytes]]]


class Command(NamedTuple):
    """A command as it is run: its arguments, and files that are put beside the repository for it."""

    argv: list[str]
    files: dict[str, bytes]


PrepareCommand = Callable[[Task, list[str]], Command]


def as_written(task: Task, argv: list[str]) -> Command:
    """The policy's command as it is."""
    return Command(argv, {})


class RepositoryState(msgspec.Struct, frozen=True, kw_only=True):
    """What a session carries: what differs from the task's files, and the questions asked."""

    layer: Layer = {}
    questions: int = 0


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user answers to a question that holds any of these words."""

    words: tuple[str, ...]
    text: str


async def task_files(task: Task) -> Mapping[str, bytes]:
    """The files that a task carries itself, as text by path, in `input["files"]`. Raises: TaskSetError."""
    try:
        files = msgspec.convert(task.input.get("files"), dict[str, str])
    except msgspec.ValidationError as error:
        raise TaskSetError(f"task {task.id}: input.files must be texts by path: {error}") from error
    return {path: text.encode() for path, text in files.items()}


@dataclass(slots=True)
class _Base:
    """A task's files, and the snapshot of them that sandboxd keeps, once there is one.

    `built` is one that the task names: it has dependencies beside the files, and cannot be made of them.
    """

    files: Mapping[str, bytes]
    built: str = ""
    snapshot: str = ""


_Other: TypeAlias = Callable[["RepositoryWorld", Task, _Base, dict[str, Any], RepositoryState], Awaitable[ToolResult]]


class RepositoryWorld:
    """See World. One object serves every session; the files of recent tasks are kept, by task."""

    def __init__(
        self,
        sandbox: Sandbox | None,
        *,
        files: LoadFiles = task_files,
        prepare: PrepareCommand = as_written,
        limits: RunLimits = COMMAND_LIMITS,
        services: Sequence[Service] = (),
        max_result_chars: int = MAX_RESULT_CHARS,
    ) -> None:
        """Without a `sandbox` no command can be run. `limits` and `services` are those of a command, which `prepare`
        may put another before.
        """
        self._sandbox = sandbox
        self._prepare = prepare
        self._load_files = files
        self._limits = limits
        self._services = tuple(services)
        self._max_result_chars = max_result_chars
        self._bases: OrderedDict[bytes, _Base] = OrderedDict()

    async def open(self, *, task: Task, key: str) -> bytes:
        """The task's files as they are. Raises: TaskSetError, WorldError."""
        await self._base_of(task)
        return msgspec.msgpack.encode(RepositoryState())

    async def call(self, *, task: Task, tool: str, arguments: dict[str, Any], state: bytes, step: str) -> ToolResult:
        """See World. `step` is not needed: calls act on `state` alone."""
        before = _decoded(state)
        base = await self._base_of(task)
        try:
            if tool in FILE_TOOLS:
                return self._result(await _file_call(tool, Tree(base.files, before.layer), arguments), before)
            return await self._other[tool](self, task, base, arguments, before)
        except ToolProblem as problem:
            return ToolResult(text=self._clipped(f"Error: {problem}"), ok=False)

    async def export(self, *, task: Task, state: bytes) -> dict[str, str]:
        """The patch for graders; the diff and the number of questions for people."""
        after = _decoded(state)
        tree = Tree((await self._base_of(task)).files, after.layer)
        return {
            PATCH: encode_patch(after.layer),
            DIFF: unified_diff(tree),
            QUESTIONS: str(after.questions),
        }

    async def close(self, *, task: Task, state: bytes) -> None:
        """See World: there is nothing to take down."""

    async def _run(self, task: Task, base: _Base, arguments: dict[str, Any], before: RepositoryState) -> ToolResult:
        if self._sandbox is None:
            raise WorldError("this repository's environment offers `run` without a sandbox")
        command = self._prepare(task, _argv(arguments["command"]))
        wall_s = min(float(arguments.get("timeout_s", self._limits.wall_s)), self._limits.wall_s)
        limits = msgspec.structs.replace(self._limits, wall_s=max(wall_s, MIN_COMMAND_S))
        try:
            result = await self._run_over(base, command, layer=before.layer, limits=limits, client=task.id)
        except SpecError as error:
            if not before.layer:
                raise TaskSetError(f"task {task.id}: no command runs over its files: {error}") from error
            raise ToolProblem(f"nothing runs over the files as they are now: {error}") from error
        text, ok = _told(result, limits)
        layer = before.layer if result.layer is None else result.layer
        if result.layer_refused:
            text += f"\n(what it did to the files was not kept: {result.layer_refused})"
        after = msgspec.structs.replace(before, layer=layer)
        return ToolResult(text=self._clipped(text), ok=ok, state=msgspec.msgpack.encode(after))

    async def _run_over(
        self, base: _Base, command: Command, *, layer: Layer, limits: RunLimits, client: str
    ) -> RunResult:
        assert self._sandbox is not None
        if not base.snapshot:
            base.snapshot = base.built or await self._sandbox.freeze(base.files)
        try:
            return await self._sandbox.run(
                command.argv,
                files=command.files,
                limits=limits,
                base=base.snapshot,
                layer=layer,
                services=self._services,
                client=client,
            )
        except SnapshotMissing:  # sandboxd was started anew, or made room: frozen again, the call can be made again
            base.snapshot = ""
            raise

    async def _ask(self, task: Task, base: _Base, arguments: dict[str, Any], before: RepositoryState) -> ToolResult:
        after = msgspec.structs.replace(before, questions=before.questions + 1)
        text = _scripted_answer(task, arguments["question"])
        return ToolResult(text=self._clipped(text), ok=True, state=msgspec.msgpack.encode(after))

    async def _submit(self, task: Task, base: _Base, arguments: dict[str, Any], before: RepositoryState) -> ToolResult:
        return ToolResult(text="submitted", ok=True, solved=True)

    _other: ClassVar[Mapping[str, _Other]] = {RUN.name: _run, ASK.name: _ask, SUBMIT.name: _submit}

    def _result(self, done: tuple[str, Tree], before: RepositoryState) -> ToolResult:
        text, tree = done
        state = None
        if tree.layer is not before.layer:
            state = msgspec.msgpack.encode(msgspec.structs.replace(before, layer=tree.layer))
        return ToolResult(text=self._clipped(text), ok=True, state=state)

    async def _base_of(self, task: Task) -> _Base:
        """The task's files, kept for the tasks used last. Raises: TaskSetError."""
        key = blake3(msgspec.json.encode(task.input)).digest()
        if key not in self._bases:
            files = await self._load_files(task)
            try:
                check_names(files)
            except SpecError as error:
                raise TaskSetError(f"task {task.id}: {error}") from error
            self._bases[key] = _Base(files, built=_built_snapshot(task))
        self._bases.move_to_end(key)
        while len(self._bases) > _KEPT_BASES:
            self._bases.popitem(last=False)
        return self._bases[key]

    def _clipped(self, text: str) -> str:
        """Head and tail of a text that is too long: an error stands at the end of most outputs."""
        limit = self._max_result_chars
        if len(text) <= limit:
            return text
        head, tail = limit // 3, limit - limit // 3
        return f"{text[:head]}\n… ({len(text) - limit} characters left out) …\n{text[-tail:]}"


def _built_snapshot(task: Task) -> str:
    """The snapshot that the task of a built repository names; or none."""
    snapshot = task.input.get(SNAPSHOT, "")
    return snapshot if isinstance(snapshot, str) else ""


async def _file_call(tool: str, tree: Tree, arguments: dict[str, Any]) -> tuple[str, Tree]:
    if tool == GREP.name:  # a pattern may take its time: other sessions go on meanwhile
        return await asyncio.to_thread(FILE_TOOLS[tool], tree, arguments)
    return FILE_TOOLS[tool](tree, arguments)


def _decoded(state: bytes) -> RepositoryState:
    """Raises: WorldError for bytes that are no state."""
    try:
        return msgspec.msgpack.decode(state, type=RepositoryState)
    except msgspec.DecodeError as error:
        raise WorldError(f"not a repository's state: {error}") from error


def _argv(command: str) -> list[str]:
    """Raises: ToolProblem for what is no command."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ToolProblem(f"the command does not parse: {error}") from None
    if not argv or "\0" in command or len(command) > MAX_COMMAND_CHARS:
        raise ToolProblem(f"the command must be a program and its arguments, up to {MAX_COMMAND_CHARS} characters")
    return argv


def _told(result: RunResult, limits: RunLimits) -> tuple[str, bool]:
    """What the policy reads of a run, and whether the program came to its own end."""
    ends = {
        Outcome.OK: f"(exit code {result.exit_code})",
        Outcome.TIMEOUT: f"(stopped: it ran longer than {limits.wall_s:g} s)",
        Outcome.MEMORY: f"(stopped: it used more than {limits.memory_bytes // MIB} MiB)",
        Outcome.KILLED: "(stopped by a signal)",
        Outcome.OUTPUT_LIMIT: f"(stopped: it wrote more than {limits.output_bytes} bytes)",
        Outcome.SERVICE: "(not run: a service of this repository did not start)",
    }
    written = [part.decode(errors="replace").rstrip("\n") for part in (result.stdout, result.stderr)]
    return "\n".join([*filter(None, written), ends[result.outcome]]), result.outcome is Outcome.OK


def _scripted_answer(task: Task, question: str) -> str:
    """The first answer of `reference["answers"]` with a word that the question has. Raises: TaskSetError."""
    try:
        answers = msgspec.convert(task.reference.get("answers", []), list[ScriptedAnswer])
    except msgspec.ValidationError as error:
        raise TaskSetError(f"task {task.id}: reference.answers: {error}") from error
    asked = question.lower()
    return next((one.text for one in answers if any(word.lower() in asked for word in one.words)), NO_ANSWER)
