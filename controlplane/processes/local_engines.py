"""The engines of local clusters: tokens, ports and command lines for replicas that `manage.py up` runs itself."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from django.conf import settings

from controlplane.models import Cluster, Replica
from controlplane.processes.ports import LOOPBACK, free_port, port_is_free
from controlplane.processes.records import write_atomically
from controlplane.processes.specs import ENGINE_ENV, ProcessSpec
from controlplane.services.events import SYSTEM
from controlplane.services.fleet import replica_register
from controlplane.states import WeightSlot

MAX_TOKENS = 1024


class LocalEngines:
    """Makes one spec for each replica of a local cluster, once: ask again to learn of new ones."""

    def __init__(self, *, clusters: Collection[str] = (), max_tokens: int = MAX_TOKENS) -> None:
        """`clusters` are the slugs of those whose engines run; none named: all. `max_tokens` bounds a sequence."""
        self._clusters = clusters
        self._max_tokens = max_tokens
        self._known: set[object] = set()
        self._names: set[str] = set()
        self._ports: set[int] = set()

    def new_specs(self) -> list[ProcessSpec]:
        """Specs for replicas not seen before, whose rows now say where they will listen. A replica without a model
        folder has to wait for one.
        """
        replicas = Replica.objects.filter(cluster__local=True).select_related("cluster__model").order_by("created_at")
        if self._clusters:
            replicas = replicas.filter(cluster__slug__in=self._clusters)
        specs = []
        for replica in replicas:
            model = replica.cluster.model
            if replica.pk in self._known or model is None or not Path(model.folder).is_dir():
                continue
            self._known.add(replica.pk)
            specs.append(self._spec(replica, Path(model.folder)))
        return specs

    def _spec(self, replica: Replica, folder: Path) -> ProcessSpec:
        inference, control = (self._port(url) for url in (replica.inference_url, replica.control_url))
        replica_register(
            cluster=replica.cluster,
            name=replica.name,
            inference_url=f"http://{LOOPBACK}:{inference}",
            control_url=f"http://{LOOPBACK}:{control}",
            weight_slots=replica.weight_slots,
            actor=SYSTEM,
        )
        slots = ",".join(slot.value for slot in list(WeightSlot)[: replica.weight_slots])
        tokens = replica_tokens(replica)
        argv = [sys.executable, "-u", "-m", "rl_core.engines", "--model", str(folder), "--store", settings.STORE_URL]
        argv += ["--name", replica.name, "--port", str(inference), "--control-port", str(control)]
        argv += ["--inference-token-file", str(tokens["inference"]), "--control-token-file", str(tokens["control"])]
        argv += ["--spool", str(settings.STATE_DIR / "spool" / str(replica.pk))]
        argv += ["--peer-token-file", str(peer_token(replica.cluster))]
        argv += ["--weight-slots", slots, "--update-threads", str(settings.UPDATE_THREADS)]
        argv += ["--max-seqs", str(settings.ENGINE_MAX_SEQS)]
        argv += ["--max-len", str(self._max_tokens), "--threads", str(settings.ENGINE_THREADS), "--log-level", "info"]
        return ProcessSpec(name=self._name(replica), argv=tuple(argv), env=dict(ENGINE_ENV), priority=30)

    def _name(self, replica: Replica) -> str:
        slug = replica.cluster.slug
        name = f"engine-{replica.name}" if replica.name.startswith(slug) else f"engine-{slug}-{replica.name}"
        if name in self._names:  # another project has a cluster of that name
            name = f"{name}-{replica.pk.hex[-6:]}"
        self._names.add(name)
        return name

    def _port(self, url: str) -> int:
        """The port of last time when it is still free: running sessions find the engine again after a restart."""
        port = urlsplit(url).port if url else None
        if port is None or port in self._ports or not port_is_free(port):
            port = free_port(taken=self._ports)
        self._ports.add(port)
        return port


def replica_tokens(replica: Replica) -> dict[str, Path]:
    """Files with the bearer tokens of a replica's two listeners, made on first use, readable by their owner alone."""
    return {kind: _token_file(f"{replica.pk}.{kind}") for kind in ("control", "inference")}


def peer_token(cluster: Cluster) -> Path:
    """The file with the token that the cluster's replicas ask of each other for segments; made on first use."""
    return _token_file(f"{cluster.pk}.peers")


def _token_file(name: str) -> Path:
    path: Path = settings.REPLICA_TOKEN_DIR / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, secrets.token_urlsafe(32).encode())
    return path
