"""Long series thinned in SQL, before they are read: what a page or the API gets does not grow with a run's length."""

from __future__ import annotations

from django.db.models import F, QuerySet, Window
from django.db.models.functions import RowNumber

from controlplane.models import MetricPoint

RAW_LIMIT = 40_000  # points of a series that are read at most


def points_thinned(rows: QuerySet[MetricPoint], total: int) -> QuerySet[MetricPoint]:
    """Of one series with `total` points every so many-th, its newest among them, so that at most `RAW_LIMIT` are left.

    Counted within the series: ids of series that are written together have gaps of a fixed size.
    """
    if total <= RAW_LIMIT:
        return rows
    stride = total // RAW_LIMIT + 1
    newest_first = [F("step").desc(), F("at").desc(), F("pk").desc()]
    return (
        rows.annotate(place=Window(RowNumber(), order_by=newest_first)).alias(phase=F("place") % stride).filter(phase=1)
    )
