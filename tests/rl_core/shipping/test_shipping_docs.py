"""docs/shipping.md shows what the commands print, and names every field of a cadence."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from rl_core.shipping.__main__ import main
from rl_core.shipping.specs import CadenceSpec, CanarySpec, GateSpec, MetricSource, MetricSpec, MonitorSpec, ShadowSpec

PAGE = (Path(__file__).parents[3] / "docs/shipping.md").read_text()


def test_power_tables_are_those_of_the_command(capsys):
    shown = re.findall(r"```\n\$ \.venv/bin/python -m rl_core\.shipping (power[^\n]*)\n(.*?)```", PAGE, flags=re.S)
    assert shown
    for arguments, text in shown:
        assert main(arguments.split()) == 0
        assert capsys.readouterr().out == text


@pytest.mark.parametrize("spec", [CadenceSpec, CanarySpec, MetricSpec, GateSpec, ShadowSpec, MonitorSpec])
def test_every_field_is_named(spec):
    fields = {field.name for field in msgspec.structs.fields(spec)}
    assert {name for name in fields if f"`{name}`" not in PAGE} == set()


def test_every_source_is_named():
    assert {source.value for source in MetricSource if f"`{source.value}`" not in PAGE} == set()
