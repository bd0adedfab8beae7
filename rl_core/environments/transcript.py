"""What a session adds to its trajectory: exact tokens with masks, spans and routes, and messages with their place.

A segment is one context window. A new one begins where the old one's tokens cannot simply be gone on from; everything
it begins with is context, also what the policy once sampled: no token is trained twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.environments.routes import join_routes
from rl_core.environments.session import Session
from rl_core.errors import EngineUnreachable
from rl_core.types import (
    Ending,
    FinishReason,
    Generated,
    Message,
    Role,
    TokenSegment,
    Trajectory,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message's tokens stand; the default is nowhere: the policy never read it."""

    segment: int = -1
    start: int = 0
    end: int = 0


NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as it was sampled, and the results that came after it."""

    token_ids: list[int]
    results: list[str]


def check_generated(generated: Generated) -> None:
    """Raises: EngineUnreachable when a generation was cut off by others or does not add up."""
    if generated.finish_reason is FinishReason.ABORT:
        raise EngineUnreachable("the engine aborted the generation; the turn will be played again")
    if not generated.token_ids or len(generated.token_ids) != len(generated.logprobs):
        raise EngineUnreachable(
            f"the engine answered {len(generated.token_ids)} tokens with {len(generated.logprobs)} logprobs"
        )


def new_segment(session: Session, token_ids: list[int]) -> Place:
    """Begin a context window with these tokens as context."""
    segments = session.trajectory.segments
    size = len(token_ids)
    segments.append(
        TokenSegment(
            token_ids=token_ids, loss_mask=[0] * size, logprobs=[0.0] * size, spans=[], sampling=session.sampling
        )
    )
    return Place(len(segments) - 1, 0, size)


def append_context(session: Session, token_ids: list[int]) -> Place:
    """Append tokens that the policy reads."""
    segment = session.trajectory.segments[-1]
    start = len(segment.token_ids)
    _extend(segment, token_ids, mask=0, logprobs=[0.0] * len(token_ids))
    return Place(len(session.trajectory.segments) - 1, start, len(segment.token_ids))


def append_sampled(session: Session, generated: Generated, text: str, *, name: str = "") -> None:
    """Append what the policy sampled, exactly as sampled, and its message."""
    trajectory = session.trajectory
    segment = trajectory.segments[-1]
    start = len(segment.token_ids)
    segment.routes = join_routes(segment.routes, generated.routes, first_turn=not segment.spans)
    segment.spans += [VersionSpan(start + span.start, start + span.end, span.version) for span in generated.spans]
    _extend(segment, generated.token_ids, mask=1, logprobs=generated.logprobs)
    place = Place(len(trajectory.segments) - 1, start, len(segment.token_ids))
    append_message(trajectory, Role.ASSISTANT, text, place, name=name)


def append_message(trajectory: Trajectory, role: Role, content: str, place: Place, *, name: str = "") -> None:
    """Append a message after the last one."""
    trajectory.messages.append(
        Message(
            role=role,
            content=content,
            parent=len(trajectory.messages) - 1,
            name=name,
            segment=place.segment,
            start=place.start,
            end=place.end,
        )
    )


def turns_of(trajectory: Trajectory) -> tuple[list[int], list[Turn]]:
    """The tokens of the opening, and every turn since with its results, whichever window it was sampled in."""
    opening: list[int] = []
    turns: list[Turn] = []
    for message in trajectory.messages:
        if message.role is Role.ASSISTANT and message.segment >= 0:
            ids = trajectory.segments[message.segment].token_ids
            opening = opening or ids[: message.start]
            turns.append(Turn(ids[message.start : message.end], []))
        elif message.role is Role.TOOL and turns:
            turns[-1].results.append(message.content)
    return opening, turns


def end_session(session: Session, ending: Ending) -> None:
    """The session is over."""
    session.trajectory.ending = ending
    session.done = True


def _extend(segment: TokenSegment, ids: list[int], *, mask: int, logprobs: list[float]) -> None:
    segment.token_ids += ids
    segment.loss_mask += [mask] * len(ids)
    segment.logprobs += logprobs
