"""Tool calls in text: found as it comes, in any pieces, and never lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.tool_calls import CallFinder, call_opening, call_text, describe_tools, known_tools
from rl_core.types import ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
KNOWN = known_tools(TOOLS)


def found(text, *, pieces=None):
    """The text shown, the calls given on, and the finder."""
    finder = CallFinder(KNOWN)
    parts = [part for piece in pieces or [text] for part in finder.push(piece)] + finder.finish()
    shown = "".join(part for part in parts if isinstance(part, str))
    return shown, [part for part in parts if isinstance(part, ToolCall)], finder


def test_required_arguments_are_read_from_the_schema():
    assert known_tools(TOOLS) == {"weather": frozenset({"city"}), "now": frozenset()}
    odd = {"type": "function", "function": {"name": "x", "parameters": {"required": "city"}}}
    assert known_tools([odd]) == {"x": frozenset()}


def test_a_call_is_taken_out_of_the_text():
    text = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    shown, calls, finder = found(text)
    assert shown == "Let me look."
    assert [(call.tool, json.loads(call.arguments), call.ok) for call in calls] == [("weather", {"city": "Oslo"}, True)]
    assert finder.attempts == calls


def test_several_calls_in_one_or_in_many_tags():
    one = '[{"name": "now"}, {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}]'
    text = f"<tool_call>{one}</tool_call>\n\n{call_text('now', '')}"
    shown, calls, _ = found(text)
    assert shown == ""
    assert [call.tool for call in calls] == ["now", "weather", "now"]
    assert json.loads(calls[1].arguments) == {"city": "Oslo"}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "weather(Oslo)",
        '{"name": "weather", "arguments": {"city": "Oslo"}',
        '{"name": "rain", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "now", "arguments": [1]}',
        '{"name": "now", "arguments": "no json"}',
        '[{"name": "now"}, {"name": "rain"}]',
        "[" * 5000,
        '"now"',
    ],
)
def test_a_malformed_call_stays_text_and_is_counted(body):
    text = f"Well. <tool_call>{body}</tool_call> Done."
    shown, calls, finder = found(text)
    assert shown == text
    assert calls == []
    assert [(call.ok, call.arguments) for call in finder.attempts] == [(False, f"<tool_call>{body}</tool_call>")]


def test_a_call_without_required_arguments_is_given_on_and_counted_as_invalid():
    _, calls, finder = found(call_text("weather", "{}"))
    assert [(call.tool, call.ok) for call in calls] == [("weather", False)]
    assert finder.attempts == calls


def test_a_call_that_is_never_closed_counts_if_it_reads():
    whole = call_text("now", "{}").removesuffix("</tool_call>")
    assert [call.tool for call in found(whole)[1]] == ["now"]
    shown, calls, finder = found(whole[:-8])
    assert (shown, calls, len(finder.attempts)) == (whole[:-8], [], 1)


def test_text_that_only_looks_like_a_tag_is_shown():
    for text in ("a < b", "<tool", "x <tool_calls>", " \n", "a <tool_call", "<", "tail \n "):
        assert found(text)[0] == text


def test_an_opening_is_gone_on_from():
    for opening in (call_opening("weather"), call_opening()):
        rest = '{"city": "Oslo"}}</tool_call>' if opening != call_opening() else 'now"}</tool_call>'
        assert len(found("", pieces=[opening, rest])[1]) == 1


def test_the_description_names_every_tool_and_the_form():
    text = describe_tools(TOOLS)
    assert '"name":"weather"' in text
    assert '"name":"now"' in text
    assert "<tool_call>" in text


SNIPPETS = ["<tool_call>", "</tool_call>", '{"name": "now"}', " ", "\n", "word", "<", "<too", '{"name": "x"}', "é", "?"]


@given(st.lists(st.sampled_from(SNIPPETS), max_size=12).map("".join), st.integers(1, 7))
def test_the_pieces_do_not_matter_and_nothing_is_lost(text, size):
    """However the text is cut, the same is shown and called; all but calls and space around them is shown."""
    whole = found(text)
    cut = found(text, pieces=[text[at : at + size] for at in range(0, len(text), size)])
    assert (whole[0], whole[1], whole[2].attempts) == (cut[0], cut[1], cut[2].attempts)
    if not whole[1]:
        assert whole[0] == text
