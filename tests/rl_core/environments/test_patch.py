"""Patches: what a world exports is what a grader reads, and nothing odd gets in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.patch import (
    MAX_PATCH_BYTES,
    MAX_PATCH_FILES,
    PATCH,
    decode_patch,
    encode_patch,
    exported_patch,
)
from rl_core.environments.repository.tree import MAX_LAYER_BYTES, MAX_LAYER_FILES
from rl_core.errors import PatchRefused

NAMES = st.text("abc.é", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.none() | st.binary(max_size=40) | st.text(max_size=20).map(str.encode)


@given(st.dictionaries(PATHS, CONTENTS, max_size=5))
def test_a_patch_is_read_as_it_was_written(layer):
    text = encode_patch(layer)
    assert decode_patch(text) == layer
    assert encode_patch(dict(reversed(layer.items()))) == text
    assert exported_patch({PATCH: text}) == layer


@pytest.mark.parametrize("content", [b"\x01", b"\n", b"\xff", "é".encode(), b'"', b"x"])
def test_whatever_a_policy_may_write_is_a_patch_that_graders_read(content):
    """Else it could write itself out of being graded."""
    names = [f"{number}/".ljust(240, "n") for number in range(MAX_LAYER_FILES)]
    each = content * (MAX_LAYER_BYTES // MAX_LAYER_FILES // len(content))
    layer = dict.fromkeys(names, each)
    assert decode_patch(encode_patch(layer)) == layer
    one = {"a": content * (MAX_LAYER_BYTES // len(content))}
    assert decode_patch(encode_patch(one)) == one


def test_a_trajectory_without_a_patch_changed_nothing():
    assert exported_patch({"candidate": "x"}) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"a": 1}',
        '{"a": {"base64": "!"}}',
        '{"a": {"base64": "", "more": 1}}',
        '{"/etc/passwd": "x"}',
        '{"a/../b": "x"}',
        '{"a\\n": "x"}',
        '{"": "x"}',
        json.dumps({f"f{i}": "" for i in range(MAX_PATCH_FILES + 1)}),
        json.dumps({"a": "x" * MAX_PATCH_BYTES}),
    ],
)
def test_what_is_no_patch_is_refused(text):
    with pytest.raises(PatchRefused):
        decode_patch(text)
