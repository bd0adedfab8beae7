"""sandboxd: `python -m rl_core.sandbox --socket PATH --state DIR`, or `--check` to see which layers there are.

Exit codes: 0 stopped or all well, 2 wrong arguments, 3 refused: a layer of isolation is missing or the socket is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn

from rl_core.errors import SandboxRefused
from rl_core.sandbox.daemon import Sandboxd, build_app, open_socket
from rl_core.sandbox.layers import OPTIONAL, Backend, LayerState, build_launcher
from rl_core.sandbox.protocol import MIB
from rl_core.sandbox.snapshots import SnapshotStore

log = structlog.get_logger(__name__)

REFUSED = 3


class _Server(uvicorn.Server):
    """Stops on a signal and returns, so that the exit code is ours to give."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while serving."""
        loop = asyncio.get_running_loop()
        for kind in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(kind, self.handle_exit, kind, None)
        yield


def main(argv: list[str] | None = None) -> int:
    """Check or serve. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        return asyncio.run(_check(arguments) if arguments.check else _serve(arguments))
    except SandboxRefused as error:
        sys.stderr.write(f"sandboxd refuses to start: {error}\n")
        return REFUSED
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.sandbox", description="Runs untrusted code in sandboxes.")
    parser.add_argument("--check", action="store_true", help="print which layers of isolation there are, and end")
    parser.add_argument("--socket", type=Path, default=Path("var/sandboxd.sock"), help="unix socket to listen on")
    parser.add_argument("--state", type=Path, default=Path("var/sandboxd"), help="folder for its own files")
    parser.add_argument("--backend", type=Backend, choices=list(Backend), default=Backend.BUBBLEWRAP)
    parser.add_argument("--slots", type=int, default=max(2, os.cpu_count() or 2), help="runs at once")
    parser.add_argument("--ahead", type=int, default=4, help="worlds started before they are asked for")
    parser.add_argument("--max-queued", type=int, default=512, help="runs of one client that may wait for a slot")
    parser.add_argument(
        "--mount",
        type=_mount,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="software to show in every world at /opt/NAME, read-only; may be repeated",
    )
    parser.add_argument("--snapshot-bytes", type=int, default=2048 * MIB, help="room for snapshots of file trees")
    return parser


def _mount(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


async def _check(arguments: argparse.Namespace) -> int:
    launcher, states = await build_launcher(dict(arguments.mount), arguments.backend)
    launcher.close()
    for state in states:
        sys.stdout.write(f"{_mark(state):8} {state.layer.value:13} {state.detail}\n")
    return 0


def _mark(state: LayerState) -> str:
    if state.present:
        return "ok"
    return "absent" if state.layer in OPTIONAL else "MISSING"


async def _serve(arguments: argparse.Namespace) -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # whoever waits holds a connection
    listener = open_socket(arguments.socket)
    try:
        launcher, states = await build_launcher(dict(arguments.mount), arguments.backend)
        arguments.state.mkdir(parents=True, exist_ok=True)
        (arguments.state / "sandboxd.pid").write_text(f"{os.getpid()}\n")
        snapshots = SnapshotStore(arguments.state / "snapshots", arguments.snapshot_bytes)
        service = Sandboxd(
            launcher,
            states,
            snapshots,
            slots=arguments.slots,
            ahead=arguments.ahead,
            max_queued=arguments.max_queued,
        )
        config = uvicorn.Config(build_app(service), log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        log.info("sandboxd_ready", socket=str(arguments.socket), slots=arguments.slots)
        try:
            await _Server(config).serve(sockets=[listener])
        finally:
            launcher.close()
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            arguments.socket.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
