"""The main navigation: one table. To add a page, add a row; its group is made where it is first named."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.permissions import Action, allowed


@dataclass(frozen=True, slots=True)
class Entry:
    """One page of the navigation. `section` is what a page names itself to be marked as current."""

    section: str
    label: str
    url_name: str
    icon: str
    group: str = ""
    action: Action = Action.READ
    shortcut: str = ""


ENTRIES: list[Entry] = [
    Entry("home", "Home", "home", "home", shortcut="h"),
    Entry("runs", "Runs", "runs", "run", "Train", shortcut="r"),
    Entry("rollouts", "Rollouts", "rollouts", "rollout", "Train", shortcut="o"),
    Entry("task_sets", "Task sets", "task_sets", "tasks", "Train", shortcut="t"),
    Entry("environments", "Environments", "environments", "environment", "Train", shortcut="n"),
    Entry("rubrics", "Rubrics", "rubrics", "rubric", "Train", shortcut="b"),
    Entry("lanes", "Lanes", "lanes", "lane", "Ship", shortcut="l"),
    Entry("feedback", "Feedback", "feedback", "feedback", "Ship", shortcut="f"),
    Entry("alerts", "Alerts", "alerts", "alert", "Ship", shortcut="a"),
    Entry("clusters", "Clusters", "clusters", "cluster", "Operate", shortcut="c"),
    Entry("work", "Work", "work", "work", "Operate", shortcut="w"),
    Entry("events", "Events", "events", "events", "Operate", shortcut="e"),
    Entry("people", "Members", "members", "people", "Project", shortcut="m"),
    Entry("keys", "API keys", "keys", "key", "Project", Action.PROJECT_MANAGE, shortcut="k"),
]


def navigation(role: str) -> list[tuple[str, list[Entry]]]:
    """Groups in order of first mention, each with the entries that the role may open."""
    groups: dict[str, list[Entry]] = {}
    for entry in ENTRIES:
        if allowed(role, entry.action):
            groups.setdefault(entry.group, []).append(entry)
    return list(groups.items())
