"""Calls as policies write them: what can be made, and what is wrong with what cannot."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.tool_syntax import (
    JSON_SYNTAX,
    MAX_PROBLEM_CHARS,
    BadCall,
    Call,
    Tags,
    TagSyntax,
    Tool,
    check_arguments,
)
from rl_core.errors import SpecError

TOOLS = (
    Tool(
        name="weather",
        description="The weather.",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(name="now", description="The time.", parameters={"type": "object"}, read_only=True),
)
TAGS = TagSyntax(
    tags=(
        Tags(tool="weather", argument="city", open="<weather>", close="</weather>"),
        Tags(tool="now", argument="zone", open="<now>", close="</now>"),
    ),
    complaint="Error: use tags",
)


def find(text, syntax=JSON_SYNTAX):
    return syntax.find(TOOLS, text)


def call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("text", "cities"),
    [
        (call(OSLO), ["Oslo"]),
        (f"I look it up. {call(OSLO)}{call(OSLO.replace('Oslo', 'Bergen'))} Done.", ["Oslo", "Bergen"]),
        (call(f"[{OSLO}, {OSLO.replace('Oslo', 'Bergen')}]"), ["Oslo", "Bergen"]),
        (f"<tool_call>{OSLO}", ["Oslo"]),
        (call('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}'), ["Oslo"]),
        ("No call at all.", []),
    ],
)
def test_calls_in_json(text, cities):
    assert find(text) == [Call("weather", {"city": city}) for city in cities]


def test_arguments_may_be_left_out_where_none_is_required():
    assert find(call('{"name": "now"}')) == [Call("now", {})]


@pytest.mark.parametrize(
    ("body", "tool", "problem"),
    [
        ("weather in Oslo", "", "not JSON"),
        ('{"name": "weather", "arguments": {"city": "Oslo"}', "", "not JSON"),
        ("[]", "", "no call"),
        ("7", "", "an object with"),
        ('{"arguments": {}}', "", "an object with"),
        ('{"name": ["weather"]}', "", "an object with"),
        ('{"name": "weather", "arguments": ["Oslo"]}', "weather", "must be an object"),
        ('{"name": "weather", "arguments": "Oslo"}', "weather", "must be an object"),
        ('{"name": "wether", "arguments": {"city": "Oslo"}}', "", "no tool named 'wether'; there are: weather, now"),
        ('{"name": "weather", "arguments": {}}', "weather", "'city' is a required property"),
        ('{"name": "weather", "arguments": {"city": 7}}', "weather", r"\['city'\] of weather: 7 is not of type"),
        ('{"name": "weather", "arguments": {"city": "O", "day": 1}}', "weather", "'day' was unexpected"),
        ('{"name": "weather", "arguments": {"city": "O", "days": 0}}', "weather", "less than the minimum"),
        ('{"name": "weather", "arguments": {"city": "O", "days": 1.5}}', "weather", "not of type 'integer'"),
        ('{"name": "weather", "arguments": {"city": "O", "days": 1.0}}', "weather", "not of type 'integer'"),
        ('{"name": "weather", "arguments": {"city": "O", "days": 1e300}}', "weather", "not of type 'integer'"),
        ("[" * 100_000, "", "not JSON"),
        ('{"name": "weather", "arguments": {"city": "\ud800"}}', "", "not JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body, tool, problem):
    (found,) = find(call(body))
    assert isinstance(found, BadCall)
    assert found.tool == tool
    assert found.problem.startswith("Error: ")
    assert re.search(problem, found.problem)


def test_a_bad_call_among_good_ones_is_one_of_them():
    found = find(call(OSLO) + call("oops") + call(f'[{OSLO}, {{"name": "x"}}]'))
    assert [isinstance(one, BadCall) for one in found] == [False, True, False, True]


def test_a_closing_tag_alone_is_a_call_that_went_wrong():
    (found,) = find(f"{OSLO}</tool_call>")
    assert isinstance(found, BadCall)


def test_what_is_said_of_a_call_is_bounded():
    long = json.dumps({"name": "weather", "arguments": {"city": ["x" * 100_000]}})
    (found,) = find(call(long))
    assert len(found.problem) < MAX_PROBLEM_CHARS + 200
    (found,) = find(call(json.dumps({"name": "x" * 100_000})))
    assert len(found.problem) < 300


@pytest.mark.parametrize(
    ("text", "tool", "argument"),
    [
        ("<weather>Oslo</weather>", "weather", "Oslo"),
        ("Now: <now> UTC </now> and on", "now", "UTC"),
        ("<weather>\nOslo \nBergen\n</weather>", "weather", "Oslo \nBergen"),
    ],
)
def test_calls_between_tags(text, tool, argument):
    (found,) = find(text, TAGS)
    assert found == Call(tool, {"city" if tool == "weather" else "zone": argument})


@pytest.mark.parametrize(
    "text",
    ["<weather>Oslo", "Oslo</weather>", "<weather>O</now>", "<weather><now></weather>", "<now>a</now><weather>",
     "</now><weather>O</weather>", "<weather>O</now></weather>"],
)  # fmt: skip
def test_tags_that_do_not_match_are_answered_with_the_complaint(text):
    (found,) = find(text, TAGS)
    assert isinstance(found, BadCall)
    assert found.problem == "Error: use tags"


def test_text_without_tags_is_no_call():
    assert find("Just <b>text</b>.", TAGS) == []


def test_where_generation_stops():
    assert TAGS.stops(parallel=1) == TAGS.stops(parallel=5) == ("</weather>", "</now>")
    assert (JSON_SYNTAX.stops(parallel=1), JSON_SYNTAX.stops(parallel=2)) == (("</tool_call>",), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "no spaces"}, "letters"),
        ({"name": ""}, "letters"),
        ({"parameters": {"type": "string"}}, "type object"),
        ({"parameters": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "no JSON schema"),
        ({"parameters": {"type": "object", "required": "a"}}, "no JSON schema"),
        ({"parameters": {"type": "object", "patternProperties": {"(a+)+$": {}}}}, "patternProperties"),
    ],
)
def test_a_tool_that_is_none_is_refused(change, message):
    with pytest.raises(SpecError, match=message):
        Tool(**{"name": "t", "description": "T.", "parameters": {"type": "object"}, **change})


class _Schema(BaseHTTPRequestHandler):
    """A schema that allows everything."""

    def do_GET(self):
        self.server.asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def test_schemas_read_nothing_from_elsewhere():
    with HTTPServer(("127.0.0.1", 0), _Schema) as server:
        server.asked = 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        away = {"type": "object", "properties": {"a": {"$ref": f"http://127.0.0.1:{server.server_port}/x.json"}}}
        found = check_arguments((Tool(name="t", description="T.", parameters=away),), "t", {"a": 1}, written="")
        server.shutdown()
        assert server.asked == 0
    assert isinstance(found, BadCall)
    assert "cannot be checked" in found.problem


def test_a_pattern_of_a_remote_tool_cannot_hold_the_worker_up():
    hostile = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a|aa)+$"}}}
    tool = Tool(name="t", description="T.", parameters=hostile)
    began_s = time.thread_time()
    found = check_arguments((tool,), "t", {"a": "a" * 60 + "!"}, written="")
    assert time.thread_time() - began_s < 3
    assert isinstance(found, BadCall)
    assert "cannot be checked" in found.problem


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.one_of(st.text(max_size=12), JSON.map(lambda v: call(json.dumps(v))), st.just(call(OSLO))), max_size=4)
)
def test_whatever_is_said_gives_calls_that_fit_or_reasons(parts):
    for syntax in (JSON_SYNTAX, TAGS):
        for found in find("".join(parts), syntax):
            if isinstance(found, Call):
                assert isinstance(check_arguments(TOOLS, found.tool, found.arguments, written=""), Call)
            else:
                assert found.problem.startswith("Error: ")
