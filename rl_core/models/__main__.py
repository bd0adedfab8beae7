"""`python -m rl_core.models convert|upcycle`: prepare model folders."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from rl_core.errors import ModelError


def main(argv: list[str] | None = None) -> int:
    """Run one command; the last line on stdout is the folder. Exit codes: 0 done, 1 a model error (on stderr)."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    arguments = _parser().parse_args(argv)
    try:
        folder = _run(arguments)
    except ModelError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="SmolLM2-135M-Instruct from its package into a folder")
    convert.add_argument("--out", type=Path, required=True)
    up = commands.add_parser("upcycle", help="a dense Llama folder into a mixture of experts (Mixtral form)")
    up.add_argument("--src", type=Path, required=True)
    up.add_argument("--out", type=Path, required=True)
    up.add_argument("--experts", type=int, default=4)
    up.add_argument("--top-k", type=int, default=2)
    up.add_argument("--experts-differ", type=float, default=0.0, metavar="NOISE", help="relative noise on each expert")
    up.add_argument("--seed", type=int, default=0)
    return parser


def _run(arguments: argparse.Namespace) -> Path:
    if arguments.command == "convert":
        from rl_core.models.smollm2 import ensure_smollm2

        return ensure_smollm2(arguments.out)
    from rl_core.models.upcycle import upcycle

    return upcycle(
        arguments.src,
        arguments.out,
        experts=arguments.experts,
        top_k=arguments.top_k,
        noise=arguments.experts_differ,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
