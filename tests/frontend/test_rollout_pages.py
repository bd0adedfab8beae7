"""Rollouts: all are listed, every filter narrows, every page follows on; a trajectory is shown token by token."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.test import Client
from django.urls import reverse
from tokenizers import Tokenizer, models

from controlplane.models import ModelCard, Rollout
from controlplane.selectors.pages_rollouts import RolloutFilter, rollouts_page
from controlplane.selectors.pages_trajectory import trajectory_view
from rl_core.store import open_store

pytestmark = pytest.mark.django_db


def test_every_rollout_is_on_exactly_one_page_in_every_order(played) -> None:
    workspace, run = played
    everything = set(Rollout.objects.filter(group__run=run).values_list("pk", flat=True))
    scored = set(Rollout.objects.filter(group__run=run, reward__isnull=False).values_list("pk", flat=True))
    for order, expected in (("newest", everything), ("best", scored), ("worst", scored)):
        seen: list = []
        after = ""
        while True:
            page = rollouts_page(workspace.project, RolloutFilter(order=order, after=after), size=5)
            seen += page.rollouts
            after = page.next
            if not after:
                break
        keys = [rollout.pk for rollout in seen]
        assert len(keys) == len(set(keys)), order
        assert set(keys) == expected, order
        if order != "newest":
            rewards = [rollout.reward for rollout in seen]
            assert rewards == sorted(rewards, reverse=order == "best")


def test_filters_narrow(played) -> None:
    workspace, run = played
    project = workspace.project

    def found(**wanted) -> list[Rollout]:
        return rollouts_page(project, RolloutFilter(run=run.pk, **wanted), size=500).rollouts

    assert {rollout.group.step.number for rollout in found(step=2)} == {2}
    assert {rollout.group.task.split for rollout in found(split="heldout")} == {"heldout"}
    assert all(rollout.reward >= 0.5 for rollout in found(reward_from=0.5))
    assert all(rollout.reward <= 0.5 for rollout in found(reward_to=0.5))
    assert {rollout.state for rollout in found(state="pending")} == {"pending"}
    assert {rollout.group.task.key for rollout in found(task="boxes-0001")} <= {
        "train-boxes-0001",
        "heldout-boxes-0001",
    }


@pytest.mark.parametrize(
    "query",
    ["step=x&reward_from=nan&run=1", "after=zz", "order=best&after=inf_1", "step=99999999999999999999", "task=%00"],
)
def test_queries_that_do_not_parse_are_not_errors(played, query: str) -> None:
    workspace, _ = played
    client = Client()
    client.force_login(workspace.owner)
    assert client.get(reverse("rollouts") + "?" + query).status_code == 200
    assert client.get(reverse("events") + "?" + query).status_code == 200


def test_tokens_carry_mask_shade_and_version(played) -> None:
    _, run = played
    rollout = Rollout.objects.filter(group__step__number=2, group__run=run).first()
    view = trajectory_view(rollout)
    segment = view.segments[0]
    assert segment.sampled == sum(token.sampled for token in segment.tokens) == 16
    assert view.versions == ["0-0", "0-1"]
    assert [token.version_name for token in segment.tokens if token.starts_span] == ["0-0", "0-1", "0-1"]
    sampled = [token for token in segment.tokens if token.sampled]
    assert all(a.shade <= b.shade for a in sampled for b in sampled if a.logprob > b.logprob)
    assert not view.tokens_known
    assert segment.tokens[0].text == f"⟨{segment.tokens[0].token_id}⟩"


def test_tokens_are_read_with_the_model_of_the_run(played, tmp_path: Path) -> None:
    _, run = played
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(20_000)}, unk_token="w0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    ModelCard.objects.filter(lineages__run=run).update(folder=str(tmp_path))
    rollout = Rollout.objects.filter(group__step__number=1, group__run=run).first()
    token = trajectory_view(rollout).segments[0].tokens[0]
    assert token.text.strip() == f"w{token.token_id}"


def test_what_is_missing_is_said(played) -> None:
    _, run = played
    rollout = Rollout.objects.filter(group__step__number=1, group__run=run).first()
    rollout.trajectory_key = "blobs/00/" + "0" * 64
    assert "the store has no object" in trajectory_view(rollout).problem.lower()
    damaged = rollout.trajectory_key = open_store(settings.STORE_URL).put_blob(b"it was something else once")
    (Path(urlsplit(settings.STORE_URL).path) / damaged).write_bytes(b"and is this now")
    assert "does not hold the bytes of its name" in trajectory_view(rollout).problem
    rollout.trajectory_key = ""
    assert "after the first turn" in trajectory_view(rollout).problem
