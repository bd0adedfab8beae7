"""Scripted policies and small worlds for environment tests."""

from rl_core.chat import ChatTokenizer
from rl_core.environments.tasks import Task
from rl_core.environments.world import LocalTools, ToolResult
from rl_core.types import FinishReason, Generated, Routes, SamplingParams, Split, VersionSpan

VERSION = "tests:0-1"


class ScriptedPolicy:
    """Says the given turns, token by token, and keeps what it was asked."""

    def __init__(self, chat: ChatTokenizer, turns: list[str], *, close: bool = True, layers: int = 0) -> None:
        self.chat, self.turns, self.close, self.layers = chat, list(turns), close, layers
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingParams] = []

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> Generated:
        self.prompts.append(prompt_token_ids)
        self.samplings.append(sampling)
        turn = self.turns[len(self.prompts) - 1]
        ids = self.chat.encode(turn)
        stopped = any(stop in turn for stop in sampling.stop)
        if self.close and not stopped:
            ids.append(min(self.chat.eos_ids))
        reason = FinishReason.STOP
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], FinishReason.LENGTH
        return self.generated(prompt_token_ids, ids, reason)

    def generated(self, prompt: list[int], ids: list[int], reason: FinishReason) -> Generated:
        half = len(ids) // 2
        number = len(self.prompts)
        spans = [VersionSpan(0, len(ids), f"tests:0-{number}")]
        if half:
            spans = [VersionSpan(0, half, f"tests:0-{number}"), VersionSpan(half, len(ids), f"tests:0-{number + 1}")]
        routes = None
        if self.layers:
            rows = len(prompt) + len(ids) - 1
            routes = Routes(rows, self.layers, 2, "uint8", bytes([number]) * (rows * self.layers * 2))
        return Generated(
            token_ids=ids,
            logprobs=[-0.5 - i for i in range(len(ids))],
            text=self.chat.decode(ids),
            finish_reason=reason,
            spans=spans,
            prompt_tokens=len(prompt),
            routes=routes,
        )


def a_task(**reference) -> Task:
    return Task(id="t1", split=Split.TRAIN, input={"question": "What is 2*3?"}, reference=reference or {"answer": "6"})


def echo_world() -> LocalTools:
    return LocalTools({"calculator": lambda task, asked: ToolResult(text=f"echo {asked['expression']}", ok=True)})
