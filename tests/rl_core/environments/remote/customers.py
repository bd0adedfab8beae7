"""A customer's world and environment, small, for tests of the protocol."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
OTHER_SECRET = "whsec_ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA="


class Counter:
    """A world with a number in it. `acts` counts what was really done."""

    tools = [
        {
            "name": "add",
            "description": "Add to the number.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        }
    ]
    example = {
        "task": {"id": "t-1", "split": "train", "input": {"prompt": "count to 3"}},
        "calls": [{"tool": "add", "arguments": {"n": 1}}, {"tool": "add", "arguments": {"n": 2}}],
    }

    def __init__(self) -> None:
        self.acts = 0
        self.closed = 0

    def open(self, task: dict[str, Any]) -> dict[str, Any]:
        return {"total": 0, "task": task}

    def call(self, state: dict[str, Any], tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.acts += 1
        state["total"] += arguments["n"]
        return {"text": str(state["total"]), "ok": True, "solved": state["total"] >= 3}

    def export(self, state: dict[str, Any]) -> dict[str, str]:
        return {"total": str(state["total"])}

    def close(self, state: dict[str, Any]) -> None:
        self.closed += 1


class Asker:
    """An environment that asks the model once, and rewards an answer with a vowel."""

    example = {"task": {"id": "t-1", "split": "train", "input": {"question": "say a"}, "reference": {}}}

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.gate = threading.Event()
        self.gate.set()

    def run(self, session: Any) -> dict[str, Any]:
        self.runs += 1
        while not self.gate.wait(0.02):
            if session.cancelled.is_set():
                self.cancelled += 1
                return {"reward": 0.0}
        question = session.task["input"]["question"]
        body = {"model": session.model.name, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            f"{session.model.base_url}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"authorization": f"Bearer {session.model.api_key}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
        return {"reward": float(any(letter in text for letter in "aeiou")), "ending": "terminated"}


COUNTER = Counter()
