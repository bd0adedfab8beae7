"""What an engine's command checks before it loads anything slow. Imports no torch."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from pathlib import Path
from typing import Final

from rl_core.engines.sockets import bind

EXIT_CANNOT_START: Final = 2


class CannotStartError(Exception):
    """Why the process ends before it serves."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: CannotStartError."""
    try:
        return bind(host, port)
    except (OSError, OverflowError) as error:
        raise CannotStartError(
            f"cannot listen on {host}:{port}: {error}; choose another port or stop what uses it"
        ) from error


def read_token(path: Path) -> str:
    """A bearer token from its file. Raises: CannotStartError."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStartError(f"cannot read the token file {path}: {error}") from error
    if not token:
        raise CannotStartError(f"the token file {path} is empty; write a secret into it")
    return token


def positive(text: str) -> int:
    """An argument that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def log_to_stderr(level: str) -> None:
    """Log from `level` on, and the chatter of libraries from warnings on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)


def engine_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Arguments that every engine's command takes."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face model folder")
    add("--name", required=True, help="the replica's name, which is also the model's for OpenAI clients")
    add("--store", help="object store URL that targets are fetched from; without it no target is taken")
    add("--spool", type=Path, help="folder that keeps fetched segments, to go on after a kill and for peers")
    add("--spool-mib", type=positive, default=8192, help="how much of them it keeps, MiB")
    add("--update-threads", type=positive, default=1, help="threads that decode and hash a version, beside generation")
    add("--peer-token-file", type=Path, help="file with the token that the replicas of a cluster share for segments")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True, help="inference listener")
    add("--control-port", type=int, required=True, help="control listener")
    add("--inference-token-file", type=Path, required=True, help="file with the inference listener's bearer token")
    add("--control-token-file", type=Path, required=True, help="file with the control listener's bearer token")
    add("--max-seqs", type=positive, default=32, help="sequences generated at once, in each slot")
    add("--max-len", type=positive, default=1024, help="longest sequence, prompt and completion together")
    add("--max-waiting", type=positive, default=256, help="requests queued before callers are sent away (429)")
    add("--drain-s", type=float, default=10.0, help="how long a swap waits for answers of one exact version, at most")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser
