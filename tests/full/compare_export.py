"""Compare an exported folder with a running engine: `compare_export.py FOLDER INFERENCE_URL TOKEN`.

Loads the folder with transformers, asks the engine for greedy tokens of a few prompts, and prints a JSON line: the
folder's root, how many prompts, and those whose tokens are not the folder's greedy ones, ties aside.
"""

import json
import sys
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

from rl_core.chat import ChatTokenizer
from rl_core.delta import weights_root
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.models.checkpoint import read_checkpoint
from rl_core.models.parameters import ComputeDtype, pick_compute_dtype

NEW_TOKENS = 20
# The engine adds in another order, and in bf16 where the CPU has it. Where two tokens are closer in logits than what
# that order, or computing the folder in bf16, changes of them, either choice is right.
ORDER = 1e-3
ROUNDED = pick_compute_dtype() is not ComputeDtype.FP32


def prompts(chat: ChatTokenizer, count: int) -> list[list[int]]:
    environment = ENVIRONMENTS["word-problems"]
    tasks = environment.build_task_set().tasks[:count]
    openings = [environment.messages(task) for task in tasks]
    return [chat.render([{"role": m.role.value, "content": m.content} for m in opening]) for opening in openings]


def engine_tokens(url: str, token: str, prompt: list[int]) -> list[int]:
    answer = httpx.post(
        f"{url}/v1/generate",
        json={"prompt_token_ids": prompt, "sampling": {"temperature": 0.0, "max_tokens": NEW_TOKENS}},
        headers={"Authorization": f"Bearer {token}"},
        timeout=120,
    )
    answer.raise_for_status()
    return answer.json()["token_ids"]


def first_difference(model, rounded, prompt: list[int], given: list[int], eos: frozenset[int]) -> int | None:
    """Where the engine's tokens leave the greedy path of the model; None where they do not."""
    ids = torch.tensor([prompt + given])
    with torch.no_grad():
        exact, near = (one(ids).logits[0, len(prompt) - 1 : -1].float() for one in (model, rounded))
    for position, (row, other, token) in enumerate(zip(exact, near, given, strict=True)):
        tie = max(ORDER, 2 * float((row - other).abs().max()))
        if row[token] < row.max() - tie:
            return position
    if len(given) < NEW_TOKENS and given[-1] not in eos:
        return len(given)
    return None


def main() -> None:
    folder, url, token = Path(sys.argv[1]), sys.argv[2], sys.argv[3].strip()
    torch.set_num_threads(1)
    chat = ChatTokenizer.load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval() if ROUNDED else model
    given = prompts(chat, 8)
    differing = []
    for number, prompt in enumerate(given):
        where = first_difference(model, rounded, prompt, engine_tokens(url, token, prompt), chat.eos_ids)
        if where is not None:
            differing.append([number, where])
    root = weights_root(read_checkpoint(folder))
    print(json.dumps({"root": root, "prompts": len(given), "differing": differing}))  # noqa: T201


if __name__ == "__main__":
    main()
