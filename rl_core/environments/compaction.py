"""When a context window fills up: ask the policy for a summary and begin again with it, or drop old tool results.

Both begin a new segment of the same rollout, and the final reward trains all segments. A summary is sampled like a turn
and trained like one. Source: self-summarisation inside the RL loop, as Cursor describes it for Composer 2; ours keeps
the task's prompt word for word beside the summary.
"""

from __future__ import annotations

import msgspec

from rl_core.chat import ChatMessage, ChatTokenizer
from rl_core.environments.calls import Answered
from rl_core.environments.opening import OpeningRenderer
from rl_core.environments.session import Session
from rl_core.environments.transcript import (
    NOWHERE,
    Place,
    Turn,
    append_context,
    append_message,
    end_session,
    new_segment,
    turns_of,
)
from rl_core.session_specs import CompactionKind, Limits
from rl_core.types import CompactionMessage, Ending, Message, Role

SUMMARY_INTRO = "Your work so far, as you summarised it yourself:"
DROPPED = "(dropped)"
_THINKING_ENDS = "</think>"


class Compactor:
    """Gives results to the policy, and makes room for them in the windows of one environment's sessions."""

    def __init__(self, chat: ChatTokenizer, openings: OpeningRenderer, *, tool_role: Role) -> None:
        self._chat = chat
        self._openings = openings
        self._tool_role = tool_role

    def budget(self, limits: Limits) -> int:
        """How many tokens of the window turns and results may fill: all but what a summary and its request need."""
        if limits.compaction.kind is not CompactionKind.SUMMARISE:
            return limits.max_context_tokens
        request = self._chat.continuation([_request(limits)])
        return limits.max_context_tokens - len(request) - limits.compaction.summary_tokens

    def append_results(self, session: Session, answered: list[Answered], *, last_token: int) -> None:
        """Append results that the policy is to go on from; the window is compacted when no turn fits after them."""
        results = [_message(one) for one in answered]
        ids = self._continuation(results, last_token=last_token)
        if self._fits(session, len(session.trajectory.segments[-1].token_ids) + len(ids)):
            _append(session, results, append_context(session, ids))
            return
        match session.limits.compaction.kind:
            case CompactionKind.NONE:
                _append(session, results, NOWHERE)
                end_session(session, Ending.TRUNCATED)
            case CompactionKind.SUMMARISE:
                self._request_summary(session, results, last_token=last_token)
            case CompactionKind.DROP_TOOL_RESULTS:
                self._drop_results(session, results)

    def restart(self, session: Session, text: str, *, cut: bool) -> None:
        """Begin again with the task and the summary; one that is cut off, empty or too long ends the session."""
        session.summarising = False
        session.compactions += 1
        results, session.carried = session.carried, []
        summary = text.rpartition(_THINKING_ENDS)[2].strip()
        carried = [f"Result of {result.name}:\n{result.content}" for result in results]
        progress = "\n\n".join([f"{SUMMARY_INTRO}\n{summary}", *carried])
        opening = self._openings.render(session.task, progress=progress)
        if cut or not summary or not self._fits(session, len(opening.token_ids)):
            _append(session, results, NOWHERE)
            end_session(session, Ending.TRUNCATED)
            return
        place = new_segment(session, opening.token_ids)
        last = msgspec.structs.replace(opening.messages[-1], name=CompactionMessage.RESTART.value)
        _append(session, [*results, last], place)

    def _fits(self, session: Session, filled: int) -> bool:
        """Whether a turn fits in a window that is filled so far; without compaction, whether one token of it does."""
        limits = session.limits
        wanted = min(session.sampling.max_tokens, limits.max_context_tokens // 4)
        if limits.compaction.kind is CompactionKind.NONE:
            wanted = 1
        return filled + wanted <= self.budget(limits)

    def _request_summary(self, session: Session, results: list[Message], *, last_token: int) -> None:
        """Ask after the results, or, where those do not fit, instead of them: they are then carried over."""
        limits, request = session.limits, _request(session.limits)
        left = limits.max_context_tokens - limits.compaction.summary_tokens
        left -= len(session.trajectory.segments[-1].token_ids)
        ids = self._continuation(results, request, last_token=last_token)
        shown = len(ids) <= left
        if not shown:
            ids = self._chat.continuation([request], last_token=last_token)
            session.carried = results
        place = append_context(session, ids)
        asked = Message(role=Role.USER, content=limits.compaction.request, name=CompactionMessage.REQUEST.value)
        _append(session, [*results, asked] if shown else [asked], place)
        session.summarising = True

    def _drop_results(self, session: Session, results: list[Message]) -> None:
        """Begin again with the same turns and without the oldest results: so many that half the room is free again."""
        opening, turns = turns_of(session.trajectory)
        turns[-1].results.extend(result.content for result in results)
        whole = [self._after(turn, turn.results) for turn in turns]
        bare = [self._after(turn, [DROPPED] * len(turn.results)) for turn in turns]
        size = len(opening) + sum(len(turn.token_ids) for turn in turns) + sum(map(len, whole))
        half, dropped = (len(opening) + session.limits.max_context_tokens) // 2, 0
        while dropped < len(turns) - 1 and size > half:
            size += len(bare[dropped]) - len(whole[dropped])
            dropped += 1
        if not self._fits(session, size):
            _append(session, results, NOWHERE)
            end_session(session, Ending.TRUNCATED)
            return
        ids = list(opening)
        for turn, after in zip(turns, [*bare[:dropped], *whole[dropped:]], strict=True):
            ids += [*turn.token_ids, *after]
        session.compactions += 1
        place = new_segment(session, ids)
        _append(session, results, Place(place.segment, len(ids) - len(whole[-1]), len(ids)))

    def _after(self, turn: Turn, results: list[str]) -> list[int]:
        messages = [Message(role=Role.TOOL, content=text) for text in results]
        return self._continuation(messages, last_token=turn.token_ids[-1])

    def _continuation(self, results: list[Message], *more: ChatMessage, last_token: int) -> list[int]:
        messages = [{"role": self._tool_role.value, "content": result.content} for result in results]
        return self._chat.continuation([*messages, *more], last_token=last_token)


def _request(limits: Limits) -> ChatMessage:
    return {"role": Role.USER.value, "content": limits.compaction.request}


def _message(one: Answered) -> Message:
    return Message(role=Role.TOOL, content=one.result.text, name=one.call.tool)


def _append(session: Session, messages: list[Message], place: Place) -> None:
    """Append messages that share a place: they were rendered together."""
    for message in messages:
        append_message(session.trajectory, message.role, message.content, place, name=message.name)
