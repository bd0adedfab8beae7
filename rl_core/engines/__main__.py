"""Serve the embedded engine: `python -m rl_core.engines --model DIR --store URL …`.

Exit codes: 0 after SIGTERM or SIGINT; 2 when it cannot start (one line on stderr says why).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from pathlib import Path

from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.sockets import bind
from rl_core.errors import RlCoreError

EXIT_CANNOT_START = 2


class _CannotStartError(Exception):
    """Why the process ends before it serves."""


def main(argv: list[str] | None = None) -> int:
    """Run the server; the process's exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        _serve(arguments)
    except _CannotStartError as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_CANNOT_START
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    # What is cheap to check comes before torch is imported.
    inference_token, control_token = _token(arguments.inference_token_file), _token(arguments.control_token_file)
    sockets = [_bind(arguments.host, port) for port in (arguments.port, arguments.control_port)]

    import torch

    from rl_core.engines.scheduler import SchedulerLimits
    from rl_core.engines.server import EngineServer, ServerOptions, serve

    torch.set_num_threads(arguments.threads)
    limits = SchedulerLimits(
        max_seqs=arguments.max_seqs,
        max_len=arguments.max_len,
        retained=arguments.max_seqs if arguments.retained is None else arguments.retained,
        max_waiting=arguments.max_waiting,
        prefill_chunk=arguments.prefill_chunk,
    )
    try:
        server = EngineServer(
            ServerOptions(
                model=arguments.model,
                name=arguments.name,
                store=arguments.store,
                inference_token=inference_token,
                control_token=control_token,
                slots=arguments.weight_slots,
                dtype=arguments.dtype,
                limits=limits,
            )
        )
    except RlCoreError as error:
        raise _CannotStartError(str(error)) from error
    logging.getLogger("rl_core.engines").info(
        "engine_listening name=%s inference=%s control=%s dtype=%s slots=%s",
        arguments.name, sockets[0].getsockname(), sockets[1].getsockname(), server.engine.dtype,
        ",".join(server.engine.slots),
    )  # fmt: skip
    asyncio.run(serve(server, *sockets))


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except (OSError, OverflowError) as error:
        raise _CannotStartError(
            f"cannot listen on {host}:{port}: {error}; choose another port or stop what uses it"
        ) from error


def _token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _CannotStartError(f"cannot read the token file {path}: {error}") from error
    if not token:
        raise _CannotStartError(f"the token file {path} is empty; write a secret into it")
    return token


def _slots(text: str) -> tuple[str, ...]:
    """`1`, `2`, or names: one slot is called `default`, two are `promoted` and `candidate`."""
    known = {"1": ("default",), "2": ("promoted", "candidate")}
    names = known.get(text) or tuple(text.split(","))
    if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError("give 1, 2, or distinct names with commas between them")
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.engines", description="Serve the embedded engine.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face model folder (Llama or Mixtral form)")
    add("--name", required=True, help="the replica's name, which is also the model's for OpenAI clients")
    add("--store", help="object store URL that targets are fetched from; without it no target is taken")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True, help="inference listener")
    add("--control-port", type=int, required=True, help="control listener")
    add("--inference-token-file", type=Path, required=True, help="file with the inference listener's bearer token")
    add("--control-token-file", type=Path, required=True, help="file with the control listener's bearer token")
    add("--weight-slots", type=_slots, default=("default",), help="1, 2 (promoted, candidate), or names: a,b")
    add("--max-seqs", type=_positive, default=32, help="sequences generated at once, in each slot")
    add("--max-len", type=_positive, default=1024, help="longest sequence, prompt and completion together")
    add("--retained", type=int, help="finished sequences kept for prefix reuse (default: as many as --max-seqs)")
    add("--max-waiting", type=_positive, default=256, help="requests queued before callers are sent away (429)")
    add("--prefill-chunk", type=_positive, default=64, help="prompt tokens computed between two decode steps")
    add("--dtype", type=ComputeDtype, choices=list(ComputeDtype), default=ComputeDtype.AUTO)
    add("--threads", type=_positive, default=1, help="threads of a matrix product")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
