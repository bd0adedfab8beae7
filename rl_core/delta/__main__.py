"""`python -m rl_core.delta snapshot|export`: a model folder's weights into a store, whole; a version out of it again.

The last line on stdout is a JSON object: of a snapshot root, manifest_key, full_bytes, parameters, architecture and
fresh, of an export folder and root. Publishing the same weights again finds them there. Exit codes: 0 done, 1 an error
(one line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import msgspec

from rl_core.delta.export import export_folder
from rl_core.delta.path import Target
from rl_core.delta.publisher import publish_snapshot
from rl_core.delta.root import weights_root
from rl_core.errors import RlCoreError, SpecError
from rl_core.models.checkpoint import count_bytes, read_checkpoint, read_config
from rl_core.store import open_store
from rl_core.types import VersionRef, WeightFormat


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the store now; `fresh` when nothing of it stood there before."""

    root: str
    manifest_key: str
    full_bytes: int
    parameters: int
    architecture: str
    fresh: bool


def main(argv: list[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    arguments = _parser().parse_args(argv)
    try:
        report = _COMMANDS[arguments.command](arguments)
    except RlCoreError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return 0


def _snapshot(arguments: argparse.Namespace) -> SnapshotReport:
    return publish_model(arguments.model, store_url=arguments.store, threads=arguments.threads)


def _export(arguments: argparse.Namespace) -> dict[str, str]:
    try:
        target = msgspec.json.decode(arguments.target, type=Target)
    except msgspec.DecodeError as error:
        raise SpecError(f"--target is no target: {error}") from error
    export_folder(
        open_store(arguments.store),
        target,
        arguments.folder,
        model=arguments.model,
        weight_format=WeightFormat(arguments.format),
        threads=arguments.threads,
    )
    return {"folder": str(arguments.folder), "root": target.root}


def publish_model(folder: Path, *, store_url: str, threads: int = 1) -> SnapshotReport:
    """Publish under `snapshots/<root>`, a key that follows from the weights. Raises: ModelError, StoreError."""
    config = read_config(folder)
    tensors = read_checkpoint(folder)
    root = weights_root(tensors, threads=threads)
    store, prefix = open_store(store_url), f"snapshots/{root}"
    fresh = not any(store.list(prefix))
    published = publish_snapshot(
        store,
        tensors,
        key_prefix=prefix,
        version=VersionRef("model", 0, 0),
        threads=threads,
    )
    return SnapshotReport(
        root=root,
        manifest_key=published.manifest_key,
        full_bytes=count_bytes(tensors),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        fresh=fresh,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.delta", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    snapshot = commands.add_parser("snapshot", help="publish whole weights")
    export = commands.add_parser("export", help="write a version as a Hugging Face folder")
    export.add_argument("--target", required=True, help="the version: a Target as JSON")
    export.add_argument("--folder", type=Path, required=True, help="the folder to make")
    export.add_argument("--format", choices=[name.value for name in WeightFormat], default=WeightFormat.BF16.value)
    for command in (snapshot, export):
        command.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
        command.add_argument("--store", required=True, help="object store URL")
        command.add_argument("--threads", type=int, default=1)
    return parser


_COMMANDS: Final = {"snapshot": _snapshot, "export": _export}

if __name__ == "__main__":
    sys.exit(main())
