"""Publishes and receives in processes that are forked from this one, so that a hundred of them can be killed.

One command a line on stdin, `{"do": "publish"|"receive"|"ahead", "url": …, "seed": …, "spool": …}`; for each, a line
with the child's pid, and one with its exit status and what it says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import structlog
import torch

from rl_core.delta import (
    Base,
    ShadowWeights,
    Target,
    fetch,
    publish_delta,
    publisher,
    read_manifest,
    reconcile,
    weights_root,
)
from rl_core.delta.codec import decode_frame, encode_frame
from rl_core.delta.early import DecodeAhead
from rl_core.delta.fetch import SegmentSource
from rl_core.delta.frames import plan_frames
from rl_core.delta.manifest import forms_digest
from rl_core.delta.spool import Spool
from rl_core.delta.words import words_of
from rl_core.engines.protocol import AnnounceBody, DraftRef, SegmentRef, StandingRef, TargetBody
from rl_core.engines.sharing import SegmentSharing
from rl_core.errors import RlCoreError
from rl_core.store import open_store
from rl_core.types import VersionRef

VERSION = VersionRef("lin", 0, 1)


def weights(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A pair of which a good part has changed: a delta of many small segments."""
    generator = torch.Generator().manual_seed(seed)
    old = {f"w{i}": (torch.randn(60_000, generator=generator) * 0.05).bfloat16() for i in range(12)}
    noise = {name: torch.randn(tensor.shape, generator=generator) * 2e-4 for name, tensor in old.items()}
    return old, {name: (tensor.float() + noise[name]).bfloat16() for name, tensor in old.items()}


def publish(url: str, *, seed: int, spool: str, fence: int = 0) -> str:
    """Publish the pair's delta as attempt `fence`; the root."""
    old, new = weights(seed)
    base = Base("lin:0-0", weights_root(old))
    return publish_delta(open_store(url), old=old, new=new, version=VERSION, base=base, fence=fence).root


def receive(url: str, *, seed: int, spool: str) -> str:
    """Bring the old weights to the new ones through a spool; the root of what came out."""
    old, new = weights(seed)
    store, shadow = open_store(url), ShadowWeights.from_tensors(old)
    target = Target(version=str(VERSION), root=weights_root(new), manifest="lineages/lin/0-1/0/manifest.json")
    reconcile(store, shadow, target, source=SegmentSource(store, spool=Spool(Path(spool))))
    return weights_root(shadow.tensors)


def ahead(url: str, *, seed: int, spool: str) -> str:
    """The same, told of the segments before the target comes, in the middle of them; those before are decoded then."""
    old, new = weights(seed)
    store, shadow = open_store(url), ShadowWeights.from_tensors(old)
    target = Target(version=str(VERSION), root=weights_root(new), manifest="lineages/lin/0-1/0/manifest.json")
    manifest = read_manifest(store, target.manifest)
    told = manifest.segments
    sharing = SegmentSharing(Path(spool))
    decoding = DecodeAhead(sharing.ahead, sharing.spool, "default")
    draft = DraftRef(shadow.root, manifest.codec, forms_digest(new))
    segments = [
        StandingRef(
            SegmentRef(segment.key, segment.size, segment.blake3),
            [msgspec.to_builtins(frame) for frame in manifest.frames if frame.segment == number],
            draft,
        )
        for number, segment in enumerate(told)
    ]
    sharing.announce(store, AnnounceBody(version=target.version, fence=0, segments=segments, slots=["default"]))
    while sharing.spool.path(told[len(told) // 2].blake3) is None:
        if decoding.due(shadow.root):
            decoding.work(shadow.root, lambda: shadow)
        else:
            time.sleep(0.001)
    body = TargetBody(version=target.version, root=target.root, manifest=target.manifest)
    with sharing.source(store, body) as source:
        reconcile(store, shadow, target, source=source, early=decoding.hand_over())
    sharing.ahead.close()
    return weights_root(shadow.tensors)


def main() -> None:
    """Serve commands."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(1)
    publisher.SEGMENT_BYTES = 24 << 10
    publisher.plan_frames = partial(plan_frames, frame_bytes=32 << 10)
    fetch.PART_BYTES = 16 << 10
    old, new = (words_of(one["w0"][:16384]) for one in weights(0))
    encoded = encode_frame(old=[old], new=[new])  # compiles, before anything is forked
    decode_frame(encoded.mode, memoryview(encoded.payload), pieces=[old.copy()])
    for line in sys.stdin:
        command = json.loads(line)
        work = {"publish": publish, "receive": receive, "ahead": ahead}[command.pop("do")]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                said = {"root": work(**command)}
            except RlCoreError as error:
                said = {"error": f"{error.code}: {error}"}
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
        os.close(writing)
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(json.dumps({"status": status, "said": json.loads(said or b"null")}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
