"""`python -m benchmarks.fleet_scale` prints the tables of docs/scale.md, from the figures kept with the code.

With `--renew` it first keeps the newest measurement of the deltas with the code, and writes the tables into the page.
The last table alone is of the concurrency that the product has today; the others project it onto all hosts.
The model has 1.04 T parameters in bf16, of which 2 % change in a step; 64 hosts with 16 threads each encode; four
clusters serve it, each with four replicas of 8 hosts (48 threads and 8 accelerators each, 25 GB/s to an accelerator)
on a network of 400 Gbit/s. All links named in a row have its rate, the trainer's too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks import fleet_sync
from benchmarks.fleet_codecs import PROFILES, Figures, committed, formats, hash_bytes_s, renew
from benchmarks.fleet_day import Prices, day_of, step_ends
from benchmarks.fleet_sync import GBIT, Ahead, ClusterSite, Format, Hosts, Plant, Synced
from rl_core.delta.fetch import CONNECTIONS, PART_BYTES

PAGE: Final = Path(__file__).parents[1] / "docs" / "scale.md"
MODEL_BYTES: Final = 2 * 1.04e12
DENSITY: Final = 0.02
LINKS_GBIT: Final = (10, 25, 100)
FORMATS: Final = {"full": "full checkpoint", "coo": "int32 + bf16", "pulse": "PULSE-like", "ours": "ours"}
STEP_S: Final = (300.0, 900.0)
REPLICAS: Final = 4
_MARKS: Final = ("<!-- tables -->", "<!-- end of tables -->")
_ENCODERS: Final = Hosts(hosts=64, threads=16)
_REPLICA: Final = Hosts(hosts=8, threads=48)
_UPLINK_RTT_S: Final = 0.01
_SWAP_S: Final = MODEL_BYTES / (_REPLICA.hosts * 8) / 25e9
_REGIONS: Final = {"us-east": (100, 0.01), "us-west": (25, 0.06), "eu-central": (25, 0.09), "ap-south": (10, 0.18)}

sync = functools.cache(fleet_sync.sync)  # tables ask for the same more than once


def plant(figures: Figures, *, gbit: float) -> Plant:
    """Four clusters, and the trainer, on links of the same rate."""
    sites = tuple(_site(name, gbit, rtt_s) for name, (_, rtt_s) in _REGIONS.items())
    return Plant(
        model_bytes=MODEL_BYTES,
        encoders=_ENCODERS,
        uplink_bytes_s=gbit * GBIT,
        clusters=sites,
        hash_bytes_s=hash_bytes_s(figures, density=DENSITY),
        commit_s=0.2,
        swap_s=_SWAP_S,
    )


def _site(name: str, gbit: float, rtt_s: float) -> ClusterSite:
    return ClusterSite(
        name=name,
        link_bytes_s=gbit * GBIT,
        rtt_s=rtt_s,
        replicas=REPLICAS,
        lan_bytes_s=400 * GBIT,
        hosts=_REPLICA,
    )


def carried(where: Plant, figures: Figures, name: str) -> tuple[Format, Synced]:
    """A version in one format; for `ours` in the profile that is there first on these links."""
    found = formats(figures, density=DENSITY)
    candidates = [found[profile] for profile in PROFILES] if name == "ours" else [found[name]]
    return min(((form, sync(where, form)) for form in candidates), key=lambda pair: pair[1].sync_s)


def links_table(figures: Figures) -> Iterator[str]:
    """Every format on every link: one version, and a day of them."""
    heads = "link | format | shipped | sync | all after it | decoded after it | pause | behind, mean | a day | $ a day"
    yield f"| {heads} |"
    yield "|---" * len(heads.split("|")) + "|"
    ends = step_ends(shortest_s=STEP_S[0], longest_s=STEP_S[1], seed=1)
    for gbit in LINKS_GBIT:
        where = plant(figures, gbit=gbit)
        for name, title in FORMATS.items():
            form, synced = carried(where, figures, name)
            late, apart = (sync(dataclasses.replace(where, ahead=how), form) for how in (Ahead.NOTHING, Ahead.FETCH))
            day = day_of(where, form, synced, ends, prices=Prices())
            yield (
                f"| {gbit} Gbit/s | {_titled(title, form)} | {synced.uploaded_bytes / 1e9:,.1f} GB |"
                f" {synced.sync_s:,.1f} s | {late.sync_s:,.1f} s | {apart.sync_s:,.1f} s | {where.swap_s:.1f} s |"
                f" {day.lag_mean:.3f} versions, {day.behind_s:,.1f} s |"
                f" {day.egress_bytes / 1e12:,.1f} TB | {day.dollars:,.0f} |"
            )


def regions_table(figures: Figures) -> Iterator[str]:
    """Clusters with links of their own: when each serves the version."""
    yield f"| format | {' | '.join(f'{name}, {gbit} Gbit/s' for name, (gbit, _) in _REGIONS.items())} |"
    yield "|---" * (1 + len(_REGIONS)) + "|"
    sites = tuple(_site(name, gbit, rtt_s) for name, (gbit, rtt_s) in _REGIONS.items())
    where = dataclasses.replace(plant(figures, gbit=100), clusters=sites)
    for name, title in FORMATS.items():
        form, synced = carried(where, figures, name)
        yield f"| {_titled(title, form)} | " + " | ".join(f"{s:,.1f} s" for s in synced.serving_s.values()) + " |"


def store_table(figures: Figures) -> Iterator[str]:
    """What a store that gives less than its clusters ask for does, and what sharing inside a cluster saves."""
    yield "| format | store gives 100 Gbit/s | 50 Gbit/s | 25 Gbit/s | 100 Gbit/s, every replica fetches for itself |"
    yield "|---" * 5 + "|"
    where = plant(figures, gbit=25)
    for name, title in FORMATS.items():
        form, _ = carried(where, figures, name)
        times = [sync(dataclasses.replace(where, egress_bytes_s=gbit * GBIT), form).sync_s for gbit in (100, 50, 25)]
        times.append(sync(dataclasses.replace(_apart(where), egress_bytes_s=100 * GBIT), form).sync_s)
        yield f"| {_titled(title, form)} | " + " | ".join(f"{s:,.1f} s" for s in times) + " |"


def today_table(figures: Figures) -> Iterator[str]:
    """Ours with what the product does today: one process at each end, and one segment under way each way."""
    encode, decode = _ENCODERS.threads, _REPLICA.threads
    yield f"| link | as assumed | one process, {encode} threads encode, {decode} decode | one process, 1 thread each |"
    yield "|---" * 4 + "|"
    for gbit in LINKS_GBIT:
        where = plant(figures, gbit=gbit)
        found = [carried(each, figures, "ours") for each in (where, _today(where, encode, decode), _today(where, 1, 1))]
        cells = (f"{synced.sync_s:,.1f} s (`{form.name}`)" for form, synced in found)
        yield f"| {gbit} Gbit/s | " + " | ".join(cells) + " |"


def _today(where: Plant, encode: int, decode: int) -> Plant:
    """The same with one process that publishes, on so many threads, and one a replica that receives."""
    one = Hosts(hosts=1, threads=decode)
    sites = (
        dataclasses.replace(site, hosts=one, window_bytes=float(CONNECTIONS * PART_BYTES)) for site in where.clusters
    )
    return dataclasses.replace(
        where,
        encoders=Hosts(hosts=1, threads=encode),
        uplink_rtt_s=_UPLINK_RTT_S,
        clusters=tuple(sites),
        ahead_segments=2,
    )


def _apart(where: Plant) -> Plant:
    """The same clusters, whose replicas share their cluster's link instead of what came over it."""
    return dataclasses.replace(
        where,
        clusters=tuple(
            dataclasses.replace(
                site, name=f"{site.name}-{number}", replicas=1, link_bytes_s=site.link_bytes_s / site.replicas
            )
            for site in where.clusters
            for number in range(site.replicas)
        ),
    )


def _titled(title: str, form: Format) -> str:
    return f"{title} (`{form.name}`)" if form.name in PROFILES else title


def report(figures: Figures) -> str:
    """All tables, with a line of what each shows."""
    parts = [
        ("Four clusters on equal links, steps of 5 to 15 minutes:", links_table),
        ("Regions with links of their own, the trainer on 100 Gbit/s; when each serves the version:", regions_table),
        ("Four clusters at 25 Gbit/s each, and what the store gives all of them together:", store_table),
        ("Four clusters on equal links, ours, with the concurrency of today's product:", today_table),
    ]
    return "\n\n".join(f"{title}\n\n" + "\n".join(table(figures)) for title, table in parts) + "\n"


def paged(page: str, tables: str) -> str:
    """The page with these tables in place of its own. Raises: ValueError without the two marks around them."""
    before, rest = page.split(f"{_MARKS[0]}\n", 1)
    return f"{before}{_MARKS[0]}\n\n{tables}\n{_MARKS[1]}{rest.split(_MARKS[1], 1)[1]}"


if __name__ == "__main__":
    if "--renew" in sys.argv[1:]:
        renew()
        PAGE.write_text(paged(PAGE.read_text(), report(committed())))
    sys.stdout.write(report(committed()))
