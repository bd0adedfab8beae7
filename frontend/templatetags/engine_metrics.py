"""What engines tell of themselves, in words and units. A figure that this build does not know keeps its own name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django import template

from frontend.templatetags.slipway import figure, percent, seconds

register = template.Library()

_WORDS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "running": ("requests under way", figure),
    "waiting": ("requests that wait", figure),
    "tokens_per_s": ("tokens a second, now", figure),
    "idle_share": ("idle of late", lambda value: percent(value, 0)),
    "decode_step_median_s": ("a decode step, median", seconds),
    "decode_step_max_s": ("the longest decode step", seconds),
    "last_pause_s": ("pause of the last swap", seconds),
    "update_gap_s": ("longest gap between steps in the last update", seconds),
    "swaps_total": ("swaps", figure),
    "faults_total": ("faults", figure),
    "aborted_total": ("requests broken off", figure),
    "requests_total": ("requests", figure),
    "prompt_tokens_total": ("tokens of prompts", figure),
    "cached_tokens_total": ("of those from the cache", figure),
    "generated_tokens_total": ("tokens generated", figure),
    "kv_rows_used": ("rows of the cache in use", figure),
    "kv_rows": ("rows of the cache", figure),
    "uptime_s": ("up for", seconds),
}
_LEFT_OUT: Final = frozenset({"polled_at"})  # the row says when it was seen


@register.filter
def engine_metrics(metrics: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """The figures with what they mean, those first that say how the engine is now."""
    told = dict(metrics)
    known = [(words, shown(told[name])) for name, (words, shown) in _WORDS.items() if name in told]
    rest = [(name, figure(value, 4)) for name, value in metrics if name not in _WORDS and name not in _LEFT_OUT]
    return known + rest
