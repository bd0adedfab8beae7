"""What the formats cost, as `python -m benchmarks delta` measured it, at any density of change.

The newest whole measurement is `var/benchmarks/delta.json`; `benchmarks/data/codec.json` is one that is kept with the
code, so that the tables of docs/scale.md can be printed again. Ratios and speeds are read off straight lines through
the measured points on logarithmic scales.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.fleet_sync import Format

COMMITTED: Final = Path(__file__).with_name("data") / "codec.json"
MEASURED: Final = Path("var/benchmarks/delta.json")
PROFILES: Final = ("small", "fast")
SEGMENT_BYTES: Final = {"small": 2**24, "fast": 2**24, "pulse": 2**26, "coo": 2**26, "full": 2**30}
_RATES: Final = ("1e6", "3e6", "1e5")
_SPEED_DENSITIES: Final = {"": 0.0025, "_dense": 0.017}

Figures = Mapping[str, float]


def committed() -> Figures:
    """The figures that are kept with the code."""
    return _numbers(COMMITTED)


def newest() -> tuple[Figures, str]:
    """The newest whole measurement and where it lies; the committed one where there is none that has every key."""
    wanted = committed()
    if MEASURED.is_file():
        found = _numbers(MEASURED)
        if not found.get("quick") and wanted.keys() <= found.keys():
            return found, str(MEASURED)
    return wanted, "benchmarks/data/codec.json"


def renew() -> None:
    """Keep the newest measurement of this machine with the code. Raises: KeyError when a figure is missing in it."""
    kept, found = json.loads(COMMITTED.read_text()), json.loads(MEASURED.read_text())
    source = {"source": "python -m benchmarks delta", "date": found["date"], "host": found["host"]}
    figures = {key: float(f"{found[key]:.4g}") for key in kept if key not in source}
    COMMITTED.write_text(json.dumps(source | figures, indent=1) + "\n")


def formats(figures: Figures, *, density: float) -> dict[str, Format]:
    """Every format by name: `small`, `fast`, `pulse` (PULSE-like), `coo` (int32 + bf16) and `full`.

    Decoders of others are not measured: they are taken to be as fast as memcpy, and so is reading whole weights.
    """
    return {name: _format(figures, name, density) for name in SEGMENT_BYTES}


def _format(figures: Figures, name: str, density: float) -> Format:
    ours, full = name in PROFILES, name == "full"
    return Format(
        name=name,
        ratio=1.0 if full else _ratio(figures, name, density),
        encode_bytes_s=_speed(figures, "" if full else f"{name}_encode_vs_memcpy", density),
        decode_bytes_s=_speed(figures, f"{name}_decode_vs_memcpy" if ours else "", density),
        segment_bytes=SEGMENT_BYTES[name],
    )


def hash_bytes_s(figures: Figures, *, density: float) -> float:
    """blake3 of a thread, among others."""
    return _speed(figures, "blake3_vs_memcpy", density)


def on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` of the straight lines through the points on logarithmic scales; the outer ones go on."""
    ordered = sorted(points)
    index = next((i for i, (known, _) in enumerate(ordered[1:-1], 1) if x < known), len(ordered) - 1)
    (x0, y0), (x1, y1) = ordered[index - 1], ordered[index]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    return y0 * math.exp(slope * math.log(x / x0))


def _ratio(figures: Figures, name: str, density: float) -> float:
    return on_line([(figures[f"density_{rate}"], figures[f"{name}_ratio_{rate}"]) for rate in _RATES], density)


def _speed(figures: Figures, key: str, density: float) -> float:
    """Bytes of weights a second of one thread while the others of its host work too; an empty key is memcpy itself."""
    shared = min(1.0, figures["scaling_2t"] / 2)
    points = [
        (known, 1e9 * figures[f"memcpy_gb_s{suffix}"] * (figures[f"{key}{suffix}"] if key else 1.0))
        for suffix, known in _SPEED_DENSITIES.items()
    ]
    return shared * on_line(points, density)


def _numbers(path: Path) -> Figures:
    read = json.loads(path.read_text())
    return {key: float(value) for key, value in read.items() if isinstance(value, int | float)}
