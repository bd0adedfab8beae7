"""A product's own harness, as a company would have it: its own loop over OpenAI's client, and its own idea of success.

Served in a process of its own by `python -m rl_core.environments.remote.server tests.full.product_shop:SHOP`.
"""

from __future__ import annotations

from typing import Any

import openai

VOWELS = "aeiou"


class Shop:
    """Asks twice in one conversation; a reply with a vowel is worth a half."""

    example = {"task": {"id": "t", "split": "train", "input": {"question": "What is it?"}, "reference": {}}}

    def run(self, session: Any) -> dict[str, Any]:
        """One session."""
        client = openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=5)
        messages: list[Any] = [{"role": "user", "content": session.task["input"]["question"]}]
        score = 0.0
        for _ in range(2):
            answer = client.chat.completions.create(model="our-model", messages=messages, temperature=0.2)
            message = answer.choices[0].message
            score += any(letter in (message.content or "") for letter in VOWELS) / 2
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
        return {"reward": score, "scores": {"turns": 1.0}, "ending": "terminated"}


SHOP = Shop()
