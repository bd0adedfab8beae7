"""`python -m rl_core.trainer`: the resident trainer. JSON lines on stdin and stdout, logs on stderr."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from rl_core.trainer.process import Server, die_with_parent, watch_requests


def main(argv: list[str] | None = None) -> int:
    """Serve until closed. Exit codes: 0 closed, 70 a bug (its traceback is in the log)."""
    parser = argparse.ArgumentParser(prog="python -m rl_core.trainer", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="end at once unless this is the parent")
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    # Whatever a library prints must not stand between answers: file descriptor 1 becomes standard error.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(arguments.threads)
    return Server(out).serve(watch_requests(sys.stdin.fileno()))


if __name__ == "__main__":
    sys.exit(main())
