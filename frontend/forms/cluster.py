"""The form of a cluster's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

from django.http import QueryDict

from controlplane.models import Cluster
from frontend.durations import number_text
from frontend.outcomes import Problems
from frontend.queries import text_of

MBIT = 1_000_000 / 8
FIELDS = ("capacity", "bandwidth_mbit", "device", "devices", "dollars_device_hour")


@dataclass(slots=True)
class ClusterForm:
    """A cluster's settings as typed; the link's limit in Mbit/s."""

    values: dict[str, str]
    problems: Problems = field(default_factory=Problems)

    @classmethod
    def of_post(cls, posted: QueryDict) -> Self:
        """What was typed."""
        return cls({name: text_of(posted, name) for name in FIELDS})

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Self:
        """What is set."""
        limit, price = cluster.bandwidth_bytes_s, cluster.dollars_device_hour
        return cls(
            {
                "capacity": str(cluster.capacity),
                "bandwidth_mbit": "" if limit is None else number_text(limit / MBIT),
                "device": cluster.device,
                "devices": str(cluster.devices),
                "dollars_device_hour": "" if price is None else number_text(price),
            }
        )

    def changes(self, cluster: Cluster) -> dict[str, Any]:
        """What differs from the cluster; what cannot be read is noted beside its field."""
        limit = self._number("bandwidth_mbit", "a rate in Mbit/s, or nothing for no limit")
        read: dict[str, Any] = {
            "capacity": self._whole("capacity"),
            "bandwidth_bytes_s": None if limit is None else round(limit * MBIT),
            "device": self.values["device"][:64],
            "devices": self._whole("devices"),
            "dollars_device_hour": self._number("dollars_device_hour", "dollars, or nothing"),
        }
        return {name: value for name, value in read.items() if value != getattr(cluster, name)}

    def _whole(self, name: str) -> int:
        text = self.values[name]
        if text.isascii() and text.isdigit() and 0 < len(text) < 10:
            return int(text)
        self.problems.add("Give a whole number", name)
        return 0

    def _number(self, name: str, what: str) -> float | None:
        if not self.values[name]:
            return None
        try:
            value = float(self.values[name])
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value >= 0:
            return value
        self.problems.add(f"Give {what}", name)
        return None
