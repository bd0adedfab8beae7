"""A taskset in the `verifiers` library's own API, as one finds it on its hub. Imported only where that is installed."""

import verifiers.v1 as vf


class Vowels(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Say something; a reply with a vowel is rewarded."""

    @vf.reward(weight=0.5)
    async def has_vowel(self, trace) -> float:
        reply = trace.branches[-1].messages[-1]
        return float(any(letter in vf_text(reply) for letter in "aeiou"))

    @vf.reward(weight=0.5)
    async def is_there(self, trace) -> float:
        return float(bool(vf_text(trace.branches[-1].messages[-1])))


class VowelTaskset(vf.Taskset[Vowels, vf.TasksetConfig]):
    """Eight questions."""

    def load(self):
        for number in range(8):
            yield Vowels(vf.TaskData(prompt=f"Say something about {number}.", system_prompt="Be short."))


def vf_text(message) -> str:
    """A message's content as text."""
    return message.content if isinstance(message.content, str) else ""


__all__ = ["VowelTaskset"]
