"""How a context window begins: the task's messages, with the tools where the policy is to be told of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rl_core.chat import ChatTokenizer
from rl_core.environments.environment import Environment
from rl_core.environments.tasks import Task
from rl_core.tool_calls import describe_tools
from rl_core.types import Message, Role


@dataclass(frozen=True, slots=True)
class Opening:
    """The messages as they are shown, in a chain, and their tokens up to the policy's turn."""

    messages: list[Message]
    token_ids: list[int]


class OpeningRenderer:
    """Renders the openings of one environment under one model's template."""

    def __init__(self, environment: Environment, chat: ChatTokenizer) -> None:
        self._environment = environment
        self._chat = chat
        self._offered = environment.offered()
        self._described = describe_tools(self._offered) if self._offered and not chat.takes_tools else ""

    def render(self, task: Task, *, progress: str = "") -> Opening:
        """The task's opening; `progress` is put below its last message. Raises: ModelError."""
        messages = list(self._environment.messages(task))
        if self._described:
            messages = _described(messages, self._described)
        if progress:
            last = messages[-1]
            messages[-1] = msgspec.structs.replace(last, content=f"{last.content}\n\n{progress}")
        ids = self._chat.render(
            [{"role": message.role.value, "content": message.content} for message in messages],
            tools=self._offered if self._chat.takes_tools else None,
        )
        return Opening([msgspec.structs.replace(m, parent=index - 1) for index, m in enumerate(messages)], ids)


def _described(messages: list[Message], tools: str) -> list[Message]:
    """The messages with the tools in words, in the system message."""
    first = messages[0]
    if first.role is not Role.SYSTEM:
        return [Message(role=Role.SYSTEM, content=tools), *messages]
    return [msgspec.structs.replace(first, content=f"{first.content}\n\n{tools}"), *messages[1:]]
