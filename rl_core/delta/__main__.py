"""`python -m rl_core.delta snapshot`: publish a model folder's weights, whole, into a store.

The last line on stdout is a JSON object with root, manifest_key, full_bytes, parameters and architecture. Publishing
the same weights again finds them there. Exit codes: 0 done, 1 an error (one line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from rl_core.delta.publisher import publish_snapshot
from rl_core.delta.root import weights_root
from rl_core.errors import RlCoreError
from rl_core.models.checkpoint import count_bytes, read_checkpoint, read_config
from rl_core.store import open_store
from rl_core.types import VersionRef


class SnapshotReport(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the store now."""

    root: str
    manifest_key: str
    full_bytes: int
    parameters: int
    architecture: str


def main(argv: list[str] | None = None) -> int:
    """Run the command; the process's exit code."""
    arguments = _parser().parse_args(argv)
    try:
        report = publish_model(arguments.model, store_url=arguments.store, threads=arguments.threads)
    except RlCoreError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return 0


def publish_model(folder: Path, *, store_url: str, threads: int = 1) -> SnapshotReport:
    """Publish under `snapshots/<root>`, a key that follows from the weights. Raises: ModelError, StoreError."""
    config = read_config(folder)
    tensors = read_checkpoint(folder)
    root = weights_root(tensors, threads=threads)
    published = publish_snapshot(
        open_store(store_url),
        tensors,
        key_prefix=f"snapshots/{root}",
        version=VersionRef("model", 0, 0),
        threads=threads,
    )
    return SnapshotReport(
        root=root,
        manifest_key=published.manifest_key,
        full_bytes=count_bytes(tensors),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rl_core.delta", description=__doc__)
    snapshot = parser.add_subparsers(dest="command", required=True).add_parser("snapshot", help="publish whole weights")
    snapshot.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    snapshot.add_argument("--store", required=True, help="object store URL")
    snapshot.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
