"""Sessions that outgrow their context window: digging brings up as much as is asked for."""

import dataclasses
import json

from rl_core.environments.harness import Harness
from rl_core.environments.opening import OpeningRenderer
from rl_core.environments.session import SeedKey, Session
from rl_core.environments.tool_syntax import JSON_SYNTAX, Tags, TagSyntax, Tool
from rl_core.environments.word_problems import ENVIRONMENT
from rl_core.environments.world import Stateless, ToolResult
from rl_core.session_specs import CompactionKind, CompactionSpec, Limits
from rl_core.tool_calls import call_text
from rl_core.types import Message, Role, SamplingParams
from tests.rl_core.environments.factories import ScriptedPolicy, a_task

SIZE = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "mark": {"type": "string"}},
    "required": ["size", "mark"],
}
DIGGING = dataclasses.replace(
    ENVIRONMENT,
    messages=lambda task: [
        Message(role=Role.SYSTEM, content="Dig."),
        Message(role=Role.USER, content="Where is the treasure?"),
    ],
    tools=(Tool(name="dig", description="Dig.", parameters=SIZE),),
    syntax=JSON_SYNTAX,
)
# The same in few tokens: `<dig>A</dig>`.
SCRATCHING = dataclasses.replace(
    DIGGING,
    tools=(Tool(name="dig", description="Dig.", parameters=SIZE | {"required": ["mark"]}),),
    syntax=TagSyntax(tags=(Tags(tool="dig", argument="mark", open="<dig>", close="</dig>"),), complaint="Dig."),
)
TURN, SUMMARY = 120, 200


class Earth(Stateless):
    """A world whose answers are as long as they are asked to be."""

    async def call(self, *, task, tool, arguments, state, step):
        return ToolResult(text=arguments["mark"] + "x" * arguments.get("size", 100), ok=True)


def dig(mark, size=500):
    return call_text("dig", json.dumps({"size": size, "mark": mark}))


def window(chat, environment=DIGGING):
    """A window that is full after three digs: a fourth turn would not leave room for a summary."""
    opening = OpeningRenderer(environment, chat).render(a_task()).token_ids
    turn, size = (dig("A"), 500) if environment is DIGGING else ("<dig>A</dig>", 100)
    after = chat.continuation([{"role": "tool", "content": "A" + "x" * size}])
    request = chat.continuation([{"role": "user", "content": "Sum up."}])
    return len(opening) + 3 * (len(chat.encode(turn)) + len(after)) + len(request) + SUMMARY + TURN // 2


async def play(chat, turns, *, environment=DIGGING, kind=CompactionKind.SUMMARISE, layers=0, **limits):
    harness = Harness(environment, chat)
    spec = CompactionSpec(kind=kind, summary_tokens=SUMMARY, request="Sum up.")
    limits = Limits(**{"max_turns": 40, "max_context_tokens": window(chat, environment), "compaction": spec, **limits})
    seed = SeedKey(run_seed=0, group="g", attempt=0)
    session = harness.start(a_task(), sampling=SamplingParams(max_tokens=TURN), limits=limits, seed=seed)
    policy = ScriptedPolicy(chat, turns, layers=layers)
    while not session.done:
        await harness.step(session, policy=policy, world=Earth())
        session = Session.from_bytes(session.to_bytes())
    session.trajectory.validate()
    return session, policy
