"""The rubric form: rows of criteria as posted, and as the service wants them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Self

from django.http import QueryDict

from controlplane.selectors.pages_catalog import CRITERION_KINDS, TIERS
from frontend.outcomes import Problems
from frontend.queries import text_of

MAX_ROWS = 40
_FIELDS = ("key", "text", "kind", "weight", "tier", "params")


@dataclass(slots=True)
class CriterionRow:
    """One criterion as typed, with what is wrong with it."""

    key: str = ""
    text: str = ""
    kind: str = CRITERION_KINDS[0]
    weight: str = "1"
    tier: str = "important"
    params: str = ""
    errors: list[str] = field(default_factory=list)

    def parsed(self) -> dict[str, Any]:
        """The row as data; what does not parse is noted in `errors`."""
        row: dict[str, Any] = {"key": self.key, "text": self.text, "kind": self.kind, "tier": self.tier, "params": {}}
        if not self.key:
            self.errors.append("a key is missing")
        if self.kind not in CRITERION_KINDS:
            self.errors.append("the kind is not known")
        if self.tier not in TIERS:
            self.errors.append("the tier is not known")
        try:
            row["weight"] = float(self.weight)
        except ValueError:
            self.errors.append("the weight is not a number")
        if self.params.strip():
            try:
                row["params"] = json.loads(self.params)
            except (ValueError, RecursionError):
                self.errors.append('the parameters are not JSON, for example {"limit": 100}')
        return row


@dataclass(slots=True)
class RubricForm:
    """A rubric as typed."""

    slug: str
    note: str
    rows: list[CriterionRow]
    problems: Problems = field(default_factory=Problems)

    @classmethod
    def blank(cls) -> Self:
        """A new rubric with one empty row."""
        return cls("", "", [CriterionRow()])

    @classmethod
    def of_criteria(cls, slug: str, criteria: list[dict[str, Any]]) -> Self:
        """A published version, to change."""
        rows = [
            CriterionRow(
                key=str(row.get("key", "")),
                text=str(row.get("text", "")),
                kind=str(row.get("kind", "")),
                weight=f"{float(row.get('weight', 0)):g}",
                tier=str(row.get("tier", "important")),
                params=json.dumps(row["params"]) if row.get("params") else "",
            )
            for row in criteria
        ]
        return cls(slug, "", rows or [CriterionRow()])

    @classmethod
    def of_post(cls, data: QueryDict, slug: str = "") -> Self:
        """What was typed, with its problems noted. Rows without key and text are left out."""
        columns = {name: data.getlist(name)[:MAX_ROWS] for name in _FIELDS}
        count = max((len(values) for values in columns.values()), default=0)
        rows = []
        for index in range(count):
            values = {name: _clean(column[index]) if index < len(column) else "" for name, column in columns.items()}
            if values["key"] or values["text"]:
                rows.append(
                    CriterionRow(
                        key=values["key"],
                        text=values["text"],
                        kind=values["kind"],
                        weight=values["weight"],
                        tier=values["tier"],
                        params=values["params"],
                    )
                )
        form = cls(slug or text_of(data, "slug"), text_of(data, "note"), rows or [CriterionRow()])
        if not form.slug:
            form.problems.add("Give the rubric a name of lower-case letters, digits and -", "slug")
        if not rows:
            form.problems.add("Add at least one criterion", "criteria")
        form.criteria()
        if any(row.errors for row in form.rows) and rows:
            form.problems.add("Some criteria need another look", "criteria")
        return form

    def criteria(self) -> list[dict[str, Any]]:
        """The rows as the service wants them."""
        for row in self.rows:
            row.errors = []
        return [row.parsed() for row in self.rows]


def _clean(text: str) -> str:
    return text.replace("\x00", "").strip()
