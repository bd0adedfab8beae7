"""`python -m rl_core.shipping power|simulate`: how many users a canary needs, and whether its promises hold.

Exit codes: 0 done, 1 a promise did not hold, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys

from rl_core.errors import SpecError
from rl_core.shipping.power import Design, power_lines


def main(argv: list[str] | None = None) -> int:
    """Print what was asked for. Returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "simulate":
        return _simulate()
    try:
        design = Design(
            margin=arguments.margin,
            alpha=arguments.alpha,
            deviation=arguments.deviation,
            replies=arguments.replies,
            icc=arguments.icc,
        )
        lines = power_lines(design, wanted=arguments.wanted)
    except SpecError as error:
        parser.error(str(error))
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines)
    return 0


def _simulate() -> int:
    from rl_core.shipping.claims import CLAIMS, claim_line  # numpy, which `power` does without

    held = True
    sys.stdout.write("| promise | wanted | seen | held |\n|---|---|---|---|\n")
    for claims in CLAIMS:
        for claim in claims():
            held &= claim.held
            sys.stdout.write(f"{claim_line(claim)}\n")
            sys.stdout.flush()
    return 0 if held else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.shipping", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("simulate", help="try every promise in simulation; takes minutes")
    power = commands.add_parser("power", help="print how many users a canary needs")
    defaults = Design()
    power.add_argument("--margin", type=float, default=defaults.margin, help="how much worse is still as good")
    power.add_argument("--alpha", type=float, default=defaults.alpha, help="what the metric may spend")
    power.add_argument("--deviation", type=float, default=defaults.deviation, help="standard deviation of a value")
    power.add_argument("--replies", type=float, default=defaults.replies, help="values a user gives")
    power.add_argument("--icc", type=float, default=defaults.icc, help="correlation of two values of one user")
    power.add_argument("--wanted", type=float, default=0.9, help="chance of the right verdict")
    return parser


if __name__ == "__main__":
    sys.exit(main())
