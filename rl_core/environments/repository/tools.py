"""The tools of a repository, with the schemas of their arguments. An environment offers all or some of them."""

from __future__ import annotations

from typing import Any, Final

from rl_core.environments.repository import file_tools
from rl_core.environments.repository.file_tools import FileTool
from rl_core.environments.tool_syntax import Tool

MAX_COMMAND_S: Final = 60


def _object(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_PATH: Final = {"type": "string", "description": "relative to the repository"}
_LINE: Final = {"type": "integer", "minimum": 1}

READ: Final = Tool(
    name="read",
    description="Read lines of a text file, numbered from 1.",
    parameters=_object("path", path=_PATH, first_line=_LINE, last_line=_LINE),
    read_only=True,
)
LIST: Final = Tool(
    name="list",
    description="List files and folders.",
    parameters=_object(path=_PATH, depth={"type": "integer", "minimum": 1, "maximum": 8}),
    read_only=True,
)
GREP: Final = Tool(
    name="grep",
    description="Find lines that match a regular expression, under a file or folder.",
    parameters=_object("pattern", pattern={"type": "string"}, path=_PATH, ignore_case={"type": "boolean"}),
    read_only=True,
)
WRITE: Final = Tool(
    name="write",
    description="Make a file, or replace it whole.",
    parameters=_object("path", "content", path=_PATH, content={"type": "string"}),
)
EDIT: Final = Tool(
    name="edit",
    description="Replace a text that is in the file exactly once.",
    parameters=_object("path", "old", "new", path=_PATH, old={"type": "string"}, new={"type": "string"}),
)
PATCH: Final = Tool(
    name="patch",
    description="Apply a unified diff to one or several files. It applies whole or not at all.",
    parameters=_object("patch", patch={"type": "string"}),
)
RUN: Final = Tool(
    name="run",
    description="Run a program in the repository, such as `python3 -m unittest`. There is no shell.",
    parameters=_object(
        "command",
        command={"type": "string"},
        timeout_s={"type": "number", "exclusiveMinimum": 0, "maximum": MAX_COMMAND_S},
    ),
)
ASK: Final = Tool(
    name="ask",
    description="Ask the user a question.",
    parameters=_object("question", question={"type": "string", "minLength": 1}),
)
SUBMIT: Final = Tool(
    name="submit",
    description="Hand in the repository as it is now, and end.",
    parameters=_object(summary={"type": "string"}),
)

FILE_TOOLS: Final[dict[str, FileTool]] = {
    READ.name: file_tools.read,
    LIST.name: file_tools.list_files,
    GREP.name: file_tools.grep,
    WRITE.name: file_tools.write,
    EDIT.name: file_tools.edit,
    PATCH.name: file_tools.patch,
}
REPOSITORY_TOOLS: Final = (READ, LIST, GREP, WRITE, EDIT, PATCH, RUN, ASK, SUBMIT)
