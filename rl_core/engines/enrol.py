"""Register an engine and keep its lease while it runs: `python -m rl_core.engines.enrol OPTIONS -- COMMAND`.

It writes the tokens that the listeners have to ask for into files, starts the command, and renews the lease until the
command ends; then it gives the lease up. Exit code: the command's own; 2 when it could not register (one line on stderr
says why); 3 when the control plane forgot the replica meanwhile. The command is ended then, as its id and its tokens
are worth nothing any more: whatever supervises this one starts it again, which registers the replica anew.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import httpx
import msgspec

from rl_core.engines.starting import EXIT_CANNOT_START, CannotStartError, log_to_stderr, positive, read_token

log = logging.getLogger(__name__)

TIMEOUT: Final = httpx.Timeout(10.0, connect=5.0)
REGISTER_FOR_S: Final = 60.0  # a control plane that is being started again is waited for
EXIT_FORGOTTEN: Final = 3
_RETRY_S: Final = 2.0
_LOOK_S: Final = 0.2


class ForgottenError(CannotStartError):
    """The control plane knows no such replica any more."""


class _Replica(msgspec.Struct):
    id: str


class _Enrolled(msgspec.Struct):
    replica: _Replica
    inference_token: str
    control_token: str
    peer_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a replica says of itself. `lease_s` is renewed after a third of it."""

    project: str
    cluster: str
    name: str
    inference_url: str
    control_url: str
    weight_slots: int = 1
    lease_s: int = 30


class ControlPlane:
    """The two calls that a replica makes, under its key."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1",
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT,
            trust_env=False,
        )

    def enrol(self, wanted: Registration) -> _Enrolled:
        """Register. Raises: CannotStartError for what a retry does not mend; httpx.HTTPError for the rest."""
        body = {
            "name": wanted.name,
            "inference_url": wanted.inference_url,
            "control_url": wanted.control_url,
            "weight_slots": wanted.weight_slots,
            "lease_s": wanted.lease_s,
        }
        response = self._http.post(f"/projects/{wanted.project}/clusters/{wanted.cluster}/replicas", json=body)
        _check(response)
        try:
            return msgspec.json.decode(response.content, type=_Enrolled)
        except msgspec.DecodeError as error:
            raise CannotStartError(
                f"the control plane's answer does not read: {error}; is it of this release?"
            ) from error

    def renew(self, wanted: Registration, replica_id: str, lease_s: int) -> None:
        """Extend the lease, or give it up with 0. Raises: ForgottenError, and as `enrol`."""
        path = f"/projects/{wanted.project}/replicas/{replica_id}/lease"
        response = self._http.post(path, json={"lease_s": lease_s})
        if response.status_code == 404 and _problem(response).get("code") == "not_found":  # not a proxy's word
            raise ForgottenError(f"the control plane knows no replica {wanted.name} of this id any more")
        _check(response)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _check(response: httpx.Response) -> None:
    """5xx and 429 pass; whatever else is an error says what is wrong with the call itself."""
    if response.status_code >= 500 or response.status_code == 429:
        response.raise_for_status()
    if not response.is_success:
        raise CannotStartError(f"the control plane refuses ({response.status_code}): {_detail(response)}")


def _detail(response: httpx.Response) -> str:
    return str(_problem(response).get("detail", response.text[:200]))[:300]


def _problem(response: httpx.Response) -> dict[str, Any]:
    """The control plane's own word of what is wrong; empty where another answered in its place."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


def register(plane: ControlPlane, wanted: Registration, tokens: Path) -> str:
    """Register, waiting for a control plane that is away, and write the tokens; the replica's id.

    Raises: CannotStartError.
    """
    deadline = time.monotonic() + REGISTER_FOR_S
    while True:
        try:
            enrolled = plane.enrol(wanted)
            break
        except httpx.HTTPError as error:
            if time.monotonic() > deadline:
                raise CannotStartError(f"no answer from the control plane: {type(error).__name__}: {error}") from error
            time.sleep(_RETRY_S)
    written = {"inference": enrolled.inference_token, "control": enrolled.control_token, "peer": enrolled.peer_token}
    try:
        tokens.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, token in written.items():
            _write(tokens / name, token)
    except OSError as error:
        raise CannotStartError(f"the tokens cannot be written: {error}") from error
    return enrolled.replica.id


def _write(path: Path, token: str) -> None:
    """Write a file that its owner alone reads, whole or not at all. What a killed one left behind is replaced."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    partial.replace(path)


def keep(plane: ControlPlane, wanted: Registration, replica_id: str, process: subprocess.Popen[bytes]) -> int:
    """Renew the lease while the process runs, then give it up; the process's exit code.

    A refusal to renew is told and asked again: the process answers those who know it, and is taken back when it can be.
    Nobody knows one that was forgotten: the process is ended, and the exit code is EXIT_FORGOTTEN.
    """
    due = time.monotonic() + wanted.lease_s / 3
    while process.poll() is None:
        time.sleep(_LOOK_S)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + wanted.lease_s / 3
        try:
            plane.renew(wanted, replica_id, wanted.lease_s)
        except ForgottenError as error:
            log.warning("replica_forgotten replica=%s error=%s", wanted.name, error)
            process.terminate()
            process.wait()
            return EXIT_FORGOTTEN
        except (httpx.HTTPError, CannotStartError) as error:
            log.warning("lease_not_renewed replica=%s error=%s", wanted.name, error)
    try:
        plane.renew(wanted, replica_id, 0)
    except (httpx.HTTPError, CannotStartError) as error:
        log.warning("lease_not_given_up replica=%s error=%s", wanted.name, error)
    return process.returncode


def main(argv: list[str] | None = None) -> int:
    """Register, run, leave; the exit code."""
    arguments = _parser().parse_args(argv)
    log_to_stderr("info")
    wanted = Registration(
        project=arguments.project,
        cluster=arguments.cluster,
        name=arguments.name,
        inference_url=arguments.inference_url,
        control_url=arguments.control_url,
        weight_slots=arguments.weight_slots,
        lease_s=arguments.lease_s,
    )
    try:
        with ControlPlane(arguments.control_plane, read_token(arguments.key_file)) as plane:
            replica_id = register(plane, wanted, arguments.token_dir)
            try:
                process = subprocess.Popen(arguments.command)
            except OSError as error:
                plane.renew(wanted, replica_id, 0)
                raise CannotStartError(f"the command does not start: {error}") from error
            _pass_on(process)
            return keep(plane, wanted, replica_id, process)
    except (CannotStartError, httpx.HTTPError) as error:
        sys.stderr.write(f"enrol: {error}\n")
        return EXIT_CANNOT_START


def _pass_on(process: subprocess.Popen[bytes]) -> None:
    """A signal to end is the command's: it finishes what it has, and the lease is kept until it has."""

    def handle(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.engines.enrol", description="Register an engine and keep its lease while it runs."
    )
    add = parser.add_argument
    add("--control-plane", required=True, metavar="URL", help="where the control plane answers")
    add("--project", required=True)
    add("--cluster", required=True)
    add("--name", required=True, help="the replica's name in its cluster")
    add("--inference-url", required=True, help="where the control plane reaches the inference listener")
    add("--control-url", required=True, help="where it reaches the control listener")
    add("--weight-slots", type=positive, default=1)
    add("--lease-s", type=positive, default=30, help="how long the replica counts as there after its last word")
    add("--key-file", type=Path, required=True, help="file with an API key of the scope replica")
    add("--token-dir", type=Path, required=True, help="folder for the files `inference`, `control` and `peer`")
    add("command", nargs="+", help="what to run, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
