"""Simulated: a version of a 1.04 T-parameter model on its way to four clusters, in every format on every link.

`sync_s_*` is from the end of the optimiser step until the last cluster serves, at 2 % density. It is a projection. The
order of things is the product's: segments are fetched and decoded while the version is published. How many hosts and
threads do it, and that links are full, is not: the product publishes from one process and decodes in one a replica,
with one segment under way each way, as the last table of `fleet_scale` has it. The codecs' speeds are measured
(`python -m benchmarks delta`), links, hosts and prices are assumed: see docs/scale.md, whose tables this prints too,
from the newest measurement there is. `--quick` changes nothing.
"""

from __future__ import annotations

import dataclasses

from benchmarks.fleet_codecs import newest
from benchmarks.fleet_day import Prices, day_of, step_ends
from benchmarks.fleet_scale import DENSITY, FORMATS, LINKS_GBIT, STEP_S, carried, plant, report, sync
from benchmarks.fleet_sync import Ahead
from benchmarks.measure import Progress


def run(*, quick: bool, progress: Progress) -> dict[str, object]:
    """Every format on every link, and a day of versions at 25 Gbit/s."""
    del quick
    figures, source = newest()
    result: dict[str, object] = {"codecs": source, "density": DENSITY}
    ends = step_ends(shortest_s=STEP_S[0], longest_s=STEP_S[1], seed=1)
    for gbit in LINKS_GBIT:
        where = plant(figures, gbit=gbit)
        for name in FORMATS:
            form, synced = carried(where, figures, name)
            result[f"sync_s_{gbit}gbit_{name}"] = synced.sync_s
            progress(f"{name} at {gbit} Gbit/s: {synced.sync_s:.1f} s")
            if gbit == 25:
                late, apart = (
                    sync(dataclasses.replace(where, ahead=how), form) for how in (Ahead.NOTHING, Ahead.FETCH)
                )
                day = day_of(where, form, synced, ends, prices=Prices())
                result |= {
                    f"sync_s_25gbit_{name}_after_commit": late.sync_s,
                    f"sync_s_25gbit_{name}_decoded_after": apart.sync_s,
                    f"shipped_gb_{name}": synced.uploaded_bytes / 1e9,
                    f"behind_versions_{name}": day.lag_mean,
                    f"behind_s_{name}": day.behind_s,
                    f"tb_a_day_{name}": day.egress_bytes / 1e12,
                    f"dollars_a_day_{name}": day.dollars,
                }
        result["pause_s"] = where.swap_s
    print(report(figures))
    return result
