"""Serve the embedded engine: `python -m rl_core.engines --model DIR --store URL …`.

Exit codes: 0 after SIGTERM or SIGINT; 2 when it cannot start (one line on stderr says why).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import sys

from rl_core.engines.protocol import ComputeDtype
from rl_core.engines.starting import (
    EXIT_CANNOT_START,
    CannotStartError,
    engine_parser,
    listen,
    log_to_stderr,
    positive,
    read_token,
)
from rl_core.errors import RlCoreError


def main(argv: list[str] | None = None) -> int:
    """Run the server; the process's exit code."""
    arguments = _parser().parse_args(argv)
    log_to_stderr(arguments.log_level)
    try:
        _serve(arguments)
    except CannotStartError as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_CANNOT_START
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    # What is cheap to check comes before torch is imported.
    inference_token, control_token = (
        read_token(path) for path in (arguments.inference_token_file, arguments.control_token_file)
    )
    peer_token = read_token(arguments.peer_token_file) if arguments.peer_token_file else None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # requests, and segments that are mapped
    sockets = [listen(arguments.host, port) for port in (arguments.port, arguments.control_port)]

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
        drain_s=arguments.drain_s,
    )
    try:
        server = EngineServer(
            ServerOptions(
                model=arguments.model,
                name=arguments.name,
                store=arguments.store,
                inference_token=inference_token,
                control_token=control_token,
                spool=arguments.spool,
                spool_bytes=arguments.spool_mib << 20,
                peer_token=peer_token,
                update_threads=arguments.update_threads,
                slots=arguments.weight_slots,
                dtype=arguments.dtype,
                limits=limits,
            )
        )
    except RlCoreError as error:
        raise CannotStartError(str(error)) from error
    logging.getLogger("rl_core.engines").info(
        "engine_listening name=%s inference=%s control=%s dtype=%s slots=%s",
        arguments.name, sockets[0].getsockname(), sockets[1].getsockname(), server.engine.dtype,
        ",".join(server.engine.slots),
    )  # fmt: skip
    asyncio.run(serve(server, *sockets))


def slot_names(text: str) -> tuple[str, ...]:
    """`1`, `2`, or names. The control plane knows one slot as `default`, two as `default` and `candidate`."""
    known = {"1": ("default",), "2": ("default", "candidate")}
    names = known.get(text) or tuple(text.split(","))
    if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError("give 1, 2, or distinct names with commas between them")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = engine_parser("python -m rl_core.engines", "Serve the embedded engine: models of Llama or Mixtral form.")
    add = parser.add_argument
    add("--weight-slots", type=slot_names, default=("default",), help="1, 2 (default, candidate), or names: a,b")
    add("--retained", type=int, help="finished sequences kept for prefix reuse (default: as many as --max-seqs)")
    add("--prefill-chunk", type=positive, default=64, help="prompt tokens computed between two decode steps")
    add("--dtype", type=ComputeDtype, choices=list(ComputeDtype), default=ComputeDtype.AUTO)
    add("--threads", type=positive, default=1, help="threads of a matrix product")
    return parser


if __name__ == "__main__":
    sys.exit(main())
