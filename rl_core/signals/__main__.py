"""`python -m rl_core.signals measure`: precision and recall of the readers of follow-ups on a labelled set."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from rl_core.errors import SignalError
from rl_core.signals.followups import read_followup
from rl_core.signals.judge import JudgeSpec, judge_followup
from rl_core.signals.measure import LabelledFollowUp, Reader, agreement, labelled_read

LABELLED_SET = Path("benchmarks/data/followups.jsonl")


def main(argv: list[str] | None = None) -> int:
    """Print one JSON object: reader → split → agreement. Exit codes: 0 done, 1 a set that cannot be read."""
    arguments = _parser().parse_args(argv)
    try:
        rows = labelled_read(arguments.set)
    except (SignalError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    splits = sorted({row.split for row in rows})
    found = {
        name: {split: agreement([row for row in rows if row.split == split], read) for split in splits}
        for name, read in _readers(arguments).items()
    }
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


def _readers(arguments: argparse.Namespace) -> dict[str, Reader]:
    readers: dict[str, Reader] = {
        "patterns": lambda row: read_followup(row.text, previous=row.previous).dissatisfied,
    }
    if arguments.judge_url:
        key = arguments.judge_key_file.read_text().strip() if arguments.judge_key_file else ""
        spec = JudgeSpec(url=arguments.judge_url, model=arguments.judge_model, api_key=key)

        def judged(row: LabelledFollowUp) -> bool:
            return judge_followup(spec, text=row.text, previous=row.previous).dissatisfied

        readers["judge"] = judged
    return readers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.signals", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="precision and recall, with 95 % intervals")
    measure.add_argument("--set", type=Path, default=LABELLED_SET, help=f"labelled lines; default {LABELLED_SET}")
    measure.add_argument("--judge-url", default="", help="an OpenAI-compatible endpoint up to /v1, measured as well")
    measure.add_argument("--judge-model", default="", help="the judge's model")
    measure.add_argument("--judge-key-file", type=Path, help="file with the judge's bearer key")
    return parser


if __name__ == "__main__":
    sys.exit(main())
