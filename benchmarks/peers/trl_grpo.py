"""TRL's GRPOTrainer, one step at a time: a line on stdin starts a step, a JSON line on stdout says what it cost.

Runs under the interpreter of the peers' environment. The reward counts digits, so that no grader's time enters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from typing import Any

OUT = os.fdopen(os.dup(1), "w")


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, help="a JSON file: a list of texts")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    os.dup2(2, 1)  # TRL prints tables

    import torch
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(1)
    lengths: list[int] = []

    def digits(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

    class Metered(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            sys.stdin.readline()
            lengths.clear()
            self.cpu, self.wall = cpu_seconds(), time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            spent = {"cpu_s": cpu_seconds() - self.cpu, "wall_s": time.perf_counter() - self.wall}
            OUT.write(json.dumps(spent | {"tokens": sum(lengths)}) + "\n")
            OUT.flush()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    with open(arguments.prompts) as file:
        prompts = [{"prompt": text} for text in json.load(file)]
    config = GRPOConfig(
        output_dir=os.path.join(os.path.dirname(arguments.prompts), "trl"),
        per_device_train_batch_size=arguments.batch,
        num_generations=arguments.group,
        max_completion_length=arguments.tokens,
        max_steps=arguments.steps,
        learning_rate=1e-6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        beta=0.0,
        temperature=1.0,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[Metered()],
    )
    OUT.write(json.dumps({"ready": True}) + "\n")
    OUT.flush()
    trainer.train()


if __name__ == "__main__":
    main()
