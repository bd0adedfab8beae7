"""Serve a model with vLLM behind our protocols: `python -m rl_core.engines.vllm --model DIR --store URL …`.

Starts an unmodified `vllm serve` on loopback and ends with it. With `--vllm-url` it attaches to one that was started by
hand, by the command that `--print-vllm-command` prints, and outlives it.

Exit codes: 0 after SIGTERM or SIGINT; 2 when it cannot start (one line on stderr says why); 3 when its vLLM ended.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rl_core.engines.sockets import bind
from rl_core.engines.starting import (
    EXIT_CANNOT_START,
    CannotStartError,
    engine_parser,
    listen,
    log_to_stderr,
    read_token,
)
from rl_core.engines.vllm.launch import (
    LOOPBACK,
    VllmOptions,
    on_cpu,
    vllm_arguments,
    vllm_command,
    vllm_environment,
)
from rl_core.engines.vllm.messages import TransferSource
from rl_core.errors import RlCoreError

EXIT_VLLM_ENDED: Final = 3

log = logging.getLogger("rl_core.engines.vllm")


def main(argv: list[str] | None = None) -> int:
    """Run sidecar and vLLM; the process's exit code."""
    arguments = _parser().parse_args(argv)
    log_to_stderr(arguments.log_level)
    try:
        if arguments.print_vllm_command:
            return _print_command(arguments)
        return _serve(arguments)
    except CannotStartError as error:
        sys.stderr.write(f"engine: {error}\n")
        return EXIT_CANNOT_START


def _serve(arguments: argparse.Namespace) -> int:
    inference_token, control_token = (
        read_token(path) for path in (arguments.inference_token_file, arguments.control_token_file)
    )
    sockets = [listen(arguments.host, port) for port in (arguments.port, arguments.control_port)]

    from rl_core.engines.vllm.server import Sidecar, SidecarOptions, serve, stop

    port = _free_port()
    url = arguments.vllm_url or f"http://{LOOPBACK}:{port}"
    if urlsplit(url).hostname not in (LOOPBACK, "localhost", "::1"):
        raise CannotStartError(f"{url} is not on loopback; vLLM's development mode must not be reached from elsewhere")
    try:
        sidecar = Sidecar(
            SidecarOptions(
                model=arguments.model,
                name=arguments.name,
                url=url,
                inference_token=inference_token,
                control_token=control_token,
                source=_source(arguments),
                slot=arguments.weight_slots,
                twin=on_cpu() if arguments.twin is None else arguments.twin,
                max_seqs=arguments.max_seqs,
                max_len=arguments.max_len,
                max_waiting=arguments.max_waiting,
                drain_s=arguments.drain_s,
            )
        )
    except RlCoreError as error:
        raise CannotStartError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="slipway-vllm-") as scratch:
        vllm = None if arguments.vllm_url else _spawn(arguments, port, Path(scratch))
        log.info(
            "engine_listening name=%s inference=%s control=%s vllm=%s pid=%s",
            arguments.name, sockets[0].getsockname(), sockets[1].getsockname(), url, vllm.pid if vllm else "attached",
        )  # fmt: skip
        try:
            died = asyncio.run(serve(sidecar, *sockets, vllm=vllm))
        finally:
            if vllm is not None and vllm.poll() is None:
                stop(vllm)
    if died is None:
        return 0
    sys.stderr.write(f"engine: vLLM ended with exit code {died}; what it wrote stands above\n")
    return EXIT_VLLM_ENDED


def _source(arguments: argparse.Namespace) -> TransferSource | None:
    if arguments.store is None:
        return None
    return TransferSource(
        store=arguments.store,
        folder=str(arguments.model.resolve()),
        spool=None if arguments.spool is None else str(arguments.spool.resolve()),
        spool_bytes=arguments.spool_mib << 20,
        peer_token=read_token(arguments.peer_token_file) if arguments.peer_token_file else None,
        update_threads=arguments.update_threads,
    )


def _spawn(arguments: argparse.Namespace, port: int, scratch: Path) -> subprocess.Popen[bytes]:
    cpu = on_cpu()
    # What vLLM inherits, not what we read.
    environment = vllm_environment(os.environ, cpu=cpu, shim=scratch)  # noqa: TID251
    return subprocess.Popen(vllm_command(vllm_arguments(_options(arguments, port), cpu=cpu)), env=environment)


def _print_command(arguments: argparse.Namespace) -> int:
    port = urlsplit(arguments.vllm_url or "").port or 8000
    cpu = on_cpu()
    # The folder stays: the command that is printed refers to it.
    environment = vllm_environment({}, cpu=cpu, shim=Path(tempfile.gettempdir()) / "slipway-vllm")
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    command = shlex.join(["vllm", *vllm_arguments(_options(arguments, port), cpu=cpu)])
    sys.stdout.write(" ".join([*settings, command]) + "\n")
    return 0


def _options(arguments: argparse.Namespace, port: int) -> VllmOptions:
    return VllmOptions(
        model=arguments.model,
        name=arguments.name,
        port=port,
        max_seqs=arguments.max_seqs,
        max_len=arguments.max_len,
        routes=arguments.routes,
        extra=tuple(arguments.vllm_arg),
    )


def _free_port() -> int:
    with bind(LOOPBACK, 0) as sock:
        return int(sock.getsockname()[1])


def _parser() -> argparse.ArgumentParser:
    parser = engine_parser("python -m rl_core.engines.vllm", "Serve a model with vLLM behind Slipway's protocols.")
    add = parser.add_argument
    add("--weight-slots", default="default", help="the name of the one weight slot")
    add("--routes", action="store_true", help="return routed experts where a request asks (mixtures of experts)")
    add(
        "--twin",
        action=argparse.BooleanOptionalAction,
        help="keep a second copy of the model that updates go into while the first generates (default: on CPUs)",
    )
    add("--vllm-url", help="attach to a vLLM that runs on loopback instead of starting one")
    add("--vllm-arg", action="append", default=[], metavar="FLAG", help="a flag for `vllm serve`, as --vllm-arg=--x=y")
    add("--print-vllm-command", action="store_true", help="print how to start vLLM by hand for --vllm-url, and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
