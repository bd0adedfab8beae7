"""Acts: each asks for a reason, says what it would reach, and works without scripts as a page of its own.

A link marked `data-act` opens the same form in a dialog; what the service refuses comes back as the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from controlplane.permissions import Action
from controlplane.selectors.pages_blast import Blast
from frontend.access import Access
from frontend.frame import show
from frontend.outcomes import Problems, refusals
from frontend.queries import whole_of

MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class Choice:
    """Something else that an act asks for: one of `options`, each a value and its words."""

    name: str
    label: str
    options: list[tuple[str, str]]
    help: str = ""


@dataclass(frozen=True, slots=True)
class Act:
    """One act on one thing. `perform` gets the reason and the revision that the asker saw; it gives what to say then.

    `revision` is the thing's present one; None for what has none. What `choices` were made, `perform` reads itself.
    """

    title: str
    explains: str
    label: str
    back: str
    section: str
    perform: Callable[[str, int | None], object]
    done: str
    dangerous: bool = False
    blast: Blast | None = None
    revision: int | None = None
    choices: tuple[Choice, ...] = ()


def require(access: Access, action: Action) -> None:
    """Raises: PermissionDenied when the role lacks the action."""
    if not access.may(action):
        raise PermissionDenied(f"your role here is {access.role}, which may not do this: ask an owner")


def reason_of(request: HttpRequest, problems: Problems) -> str:
    """The reason given, which every act needs."""
    reason = request.POST.get("reason", "").replace("\x00", "").strip()[:MAX_REASON_CHARS]
    if not reason:
        problems.add("Say why: the reason is kept in the event log", "reason")
    return reason


def ask(request: HttpRequest, access: Access, act: Act) -> HttpResponse:
    """The act's form, and the act when the form comes back."""
    problems = Problems()
    if request.method == "POST":
        reason = reason_of(request, problems)
        if not problems:
            with refusals(problems, {choice.name: choice.name for choice in act.choices}):
                act.perform(reason, whole_of(request.POST, "revision"))
                messages.success(request, act.done)
                return redirect(act.back)
    context = {"act": act, "problems": problems, "reason": request.POST.get("reason", ""), "chosen": request.POST}
    return show(
        request,
        access,
        "frontend/act.html",
        context,
        section=act.section,
        part="frontend/act_dialog.html",
        status=409 if problems else 200,
    )
