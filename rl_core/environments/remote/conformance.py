"""Does a server keep to the protocol? Each rule is tried on the running server. Standard library alone.

    python -m rl_core.environments.remote.conformance URL --secret-file FILE

prints a line for each rule. Exit codes: 0 all kept, 1 some broken, 2 wrong arguments, 3 nobody answers at the URL.
An environment is given a session whose policy is played here: it must reach this machine (`--listen`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rl_core import signing
from rl_core.environments.remote import conformance_common, conformance_sessions, conformance_worlds
from rl_core.environments.remote.conformance_common import Broken, Peer, Unanswered

Rule = Callable[[Peer], None]


class Finding(NamedTuple):
    """A rule and what is wrong with it; nothing is."""

    rule: str
    wrong: str


def rules_of(kind: str) -> list[Rule]:
    """The rules that a server of a kind has to keep, in the order in which they are tried."""
    of_kind = {"world": conformance_worlds.RULES, "environment": conformance_sessions.RULES}
    return [*conformance_common.RULES, *of_kind.get(kind, [])]


def try_rules(peer: Peer) -> Iterator[Finding]:
    """Try every rule, each by itself. Raises: Unanswered when nobody is there at all."""
    try:
        kind = str(peer.ask("describe").body.get("kind"))
    except Broken:
        kind = ""
    for rule in rules_of(kind):
        name = rule.__name__.replace("_", " ")
        try:
            rule(peer)
        except Broken as broken:
            yield Finding(name, str(broken))
        except Unanswered as gone:
            yield Finding(name, f"no answer: {gone}")
        except Exception as error:  # noqa: BLE001  # an answer in a shape that the rule did not think of
            yield Finding(name, f"the answer has another shape: {type(error).__name__}: {error}")
        else:
            yield Finding(name, "")


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m rl_core.environments.remote.conformance")
    parser.add_argument("url")
    parser.add_argument("--secret-file", type=Path, required=True, help="a file with the secret, whsec_...")
    parser.add_argument("--listen", default="127.0.0.1", help="where the server reaches this machine")
    options = parser.parse_args(arguments)
    try:
        secret = options.secret_file.read_text().strip()
        signing.key_of(secret)
    except (OSError, ValueError) as error:
        parser.error(f"--secret-file: {error}")
    broken = 0
    try:
        for finding in try_rules(Peer(options.url, secret, listen=options.listen)):
            broken += bool(finding.wrong)
            sys.stdout.write(f"{'BROKEN' if finding.wrong else 'kept  '}  {finding.rule}{_why(finding)}\n")
            sys.stdout.flush()
    except Unanswered as gone:
        sys.stderr.write(f"nobody answers at {options.url}: {gone}\n")
        return 3
    sys.stdout.write("all rules are kept\n" if not broken else f"{broken} rules are broken\n")
    return 1 if broken else 0


def _why(finding: Finding) -> str:
    return f": {finding.wrong}" if finding.wrong else ""


if __name__ == "__main__":
    raise SystemExit(main())
