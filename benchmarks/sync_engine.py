"""The engine's side of the `sync` benchmark: the embedded engine's own server, which also takes whole checkpoints.

A target whose manifest is `full/…` is a safetensors file: it is read from the same store through the same limit and
parts, its tensors are hashed to the same root, staged and swapped in as those of a delta are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file

from rl_core.delta import weights_root
from rl_core.delta.fetch import CONNECTIONS, PART_BYTES, RateLimit
from rl_core.engines.protocol import TargetBody, UpdateStats
from rl_core.engines.reconciler import SlotReconciler
from rl_core.engines.server import EngineServer, ServerOptions, serve
from rl_core.engines.sharing import SegmentSharing
from rl_core.engines.sockets import bind
from rl_core.errors import DigestMismatch
from rl_core.store import ObjectStore, open_store
from rl_core.types import VersionRef

FULL = "full/"


class FullReconciler(SlotReconciler):
    """Deltas as ever, and whole checkpoints."""

    def _apply(self, target: TargetBody) -> None:
        if not target.manifest.startswith(FULL):
            super()._apply(target)
            return
        self._engine.update_begins(slot=self._slot)
        with tempfile.NamedTemporaryFile() as file:
            _download(self._store, target.manifest, file.fileno(), limit_bytes_s=target.limit_bytes_s)
            tensors = load_file(file.name)
        root = weights_root(tensors, threads=2)
        if root != target.root:
            raise DigestMismatch(f"{target.manifest} is not what its root says")
        staged = self._engine.stage(tensors, slot=self._slot)
        pause_s = self._engine.commit(staged, version=VersionRef.parse(target.version), kv=target.kv)
        update = UpdateStats(
            bytes_fetched=sum(tensor.nbytes for tensor in tensors.values()), hops=1, fetch_s=0.0, decode_s=0.0,
            verify_s=0.0, stage_s=staged.stage_s, pause_s=pause_s, changed_tensors=staged.changed_tensors,
        )  # fmt: skip
        self._standing = type(self._standing)(target.version, root, update)


class _Server(EngineServer):
    def _make_reconcilers(self, options: ServerOptions, _: SegmentSharing | None) -> dict[str, SlotReconciler]:
        assert options.store is not None
        store, root = open_store(options.store), weights_root(self.engine.tensors())
        return {slot: FullReconciler(self.engine, slot, store=store, root=root) for slot in options.slots}


def _download(store: ObjectStore, key: str, file: int, *, limit_bytes_s: float | None) -> None:
    size = store.head(key).size_bytes
    limit = RateLimit(limit_bytes_s) if limit_bytes_s else None

    def read(start: int) -> None:
        length = min(PART_BYTES, size - start)
        if limit is not None:
            limit.take(length)
        os.pwrite(file, store.get_range(key, start=start, length=length, of=size), start)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for part in [pool.submit(read, start) for start in range(0, size, PART_BYTES)]:
            part.result()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    for name in ("model", "store", "name", "port", "control-port", "token"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sockets = [bind("127.0.0.1", int(port)) for port in (options.port, options.control_port)]
    settings = ServerOptions(
        model=Path(options.model), name=options.name, store=options.store, inference_token=options.token,
        control_token=options.token,
    )  # fmt: skip
    asyncio.run(serve(_Server(settings), *sockets))


if __name__ == "__main__":
    main()
