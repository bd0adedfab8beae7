"""Task sets from outside: whole or not at all; proven by running their tests; pinned by version."""

import io
import json
import sys
from dataclasses import replace

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from controlplane.conductor import run_advance
from controlplane.errors import Invalid, Unavailable
from controlplane.models import Event, TaskSet, TaskSetProof, WorkUnit
from controlplane.services import task_sets
from controlplane.services.catalog import rubric_publish, task_set_create
from controlplane.services.runs import run_create
from controlplane.services.task_sets import TaskFile, task_set_upload
from controlplane.states import EventType, ProofState, RunState, StageState, WorkKind, WorkState
from rl_core.environments import code_repair
from rl_core.environments.proof import Proof, ProofVerdict
from rl_core.environments.registry import ENVIRONMENTS
from rl_core.errors import WorldError
from rl_core.sandbox.client import SandboxClient
from tests.domain_factories import CRITERIA, TESTER, make_cluster, make_model, make_project, make_spec
from tests.rl_core.sandbox_process import running_sandboxd
from workers.base import work_on
from workers.prove import prove

pytestmark = pytest.mark.django_db


def word_problem(key, split="train", question=None):
    return {"id": key, "split": split, "input": {"question": question or f"q {key}"}, "reference": {"answer": "4"}}


def lines(*tasks) -> bytes:
    return "\n".join(json.dumps(task) for task in tasks).encode()


def upload(project, content, *, environment="word-problems", kind=TaskFile.JSONL):
    return task_set_upload(
        project=project, slug="mine", environment=environment, content=content, kind=kind, actor=TESTER
    )


GOOD = (word_problem("a"), word_problem("h", "heldout"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lines(*GOOD, {"id": "x"}), "line 3: "),
        (lines(*GOOD, word_problem("b", question="Q   A\n")), None),
        (lines(*GOOD, word_problem("b", "heldout", "Q   A\n")), "line 3: leak: heldout task has, but for white space"),
        (lines(*GOOD, word_problem("b", question="q a")), "line 3: same input as line 1"),
        (lines(*GOOD, word_problem("b", question="a\0b")), "NUL character, which cannot be stored: b"),
        (lines(*GOOD) + b'\n{"id": "d", "split": "train", "input": ' + b'{"a":' * 5000, "line 3: "),
        (lines(*GOOD) + b'\n{"id": "d", "split": "train", "input": {"question": "\\ud800"}}', "line 3: "),
        (lines(*GOOD) + b'\n{"id": "d", "split": "train", "input": {"question": 1e999}}', "line 3: "),
        (lines(*GOOD, {**word_problem("c"), "input": {"other": 1}}), "task c: KeyError"),
        (lines(word_problem("a")), "heldout"),
        (b"", "empty"),
        (b"\xff\xfe", "line 1: "),
    ],
)
def test_a_broken_or_leaking_set_is_refused_with_its_lines_and_nothing_is_stored(content, said):
    project = make_project()
    if said is None:
        assert upload(project, content).train_count == 2
        return
    with pytest.raises(Invalid, match=said):
        upload(project, content)
    assert not TaskSet.objects.filter(project=project).exists()


def test_a_set_is_for_an_environment_that_there_is():
    with pytest.raises(Invalid, match=r"known: .*word-problems"):
        upload(make_project(), lines(*GOOD), environment="mars")


def table(**columns) -> bytes:
    written = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), written)
    return written.getvalue()


SPLITS = ["train", "heldout"]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_parquet_table_is_the_same_set_as_its_lines(as_text):
    project = make_project()
    first = upload(project, lines(*GOOD, word_problem("c", question="é \U0001f600")))
    tasks = [*GOOD, word_problem("c", question="é \U0001f600")]
    columns = {name: [task[name] for task in tasks] for name in ("id", "split", "input", "reference")}
    for name in ("input", "reference"):
        columns[name] = [json.dumps(value) if as_text else value for value in columns[name]]
    again = upload(project, table(**columns), kind=TaskFile.PARQUET)
    assert again == first, "the newest version of equal content"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PAR1", "not a Parquet table"),
        (b"", "not a Parquet table"),
        (lines(*GOOD), "not a Parquet table"),
        (table(id=["a"], split=["train"]), "no column input"),
        (table(id=["a", "b"], split=SPLITS, input=["{", "{}"]), "not a Parquet table of tasks"),
        (table(id=["a", "b"], split=SPLITS, input=[1, 2]), "line 1: "),
        # 30 KB that say one thing 3,000 times, 600 MB in all
        (table(id=["a"] * 3000, split=["train"] * 3000, input=[json.dumps({"q": "x" * 200_000})] * 3000), "more than"),
    ],
    ids=["cut", "empty", "lines", "column", "text", "type", "bomb"],
)
def test_what_is_no_table_of_tasks_is_refused_and_takes_no_room(content, said):
    with pytest.raises(Invalid, match=said) as refused:
        upload(make_project(), content, kind=TaskFile.PARQUET)
    assert len(str(refused.value)) < 1000


def test_parquet_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr("controlplane.services.task_sets.sys.executable", sys._base_executable)
    with pytest.raises(Unavailable, match=r"slipway\[parquet\]"):
        upload(make_project(), b"PAR1", kind=TaskFile.PARQUET)


def start(project, **stage):
    make_model(project)
    make_cluster(project)
    rubric_publish(project=project, slug="word-problems", criteria=CRITERIA, author=None, note="", actor=TESTER)
    return run_create(project=project, name="r", spec=make_spec(**stage), actor=TESTER)


def test_a_stage_pins_the_version_that_its_spec_names():
    project = make_project()
    first = upload(project, lines(*GOOD))
    second = upload(project, lines(*GOOD, word_problem("b")))
    assert (first.version, second.version) == (1, 2)
    run = start(project, task_set="mine@1")
    run_advance(run.pk)
    assert run.stages.get().task_set == first
    newest = run_create(project=project, name="s", spec=make_spec(task_set="mine"), actor=TESTER)
    assert newest.spec["stages"][0]["task_set"] == "mine"
    for wrong in ("mine@3", "mine@x"):
        with pytest.raises(Invalid, match="no task set"):
            run_create(project=project, name="s", spec=make_spec(task_set=wrong), actor=TESTER)


def bug(key, code, *, split="train", hidden=((2, 3),)):
    return {
        "id": key,
        "split": split,
        "input": {"code": code, "assertion": f"assert {key}(1) == 2"},
        "reference": {
            "function": key,
            "solution": f"def {key}(x): return x + 1",
            "visible": {"args": [1], "result": 2},
            "hidden": [{"args": [given], "result": result} for given, result in hidden],
        },
    }


BUGS = (
    bug("good", "def good(x): return x - 1"),
    bug("held", "def held(x): return x - 2", split="heldout"),
    bug("fixed", "def fixed(x): return x + 1"),
    bug("wrong", "def wrong(x): return x - 1", hidden=((2, 5),)),
    {**bug("odd", "def odd(x): return x - 1"), "reference": {"function": "odd"}},
)


@pytest.fixture
def sandboxed(tmp_path_factory, settings):
    with running_sandboxd(tmp_path_factory.mktemp("s")) as daemon:
        settings.SANDBOX_SOCKET = daemon.socket
        yield


def proven(project, *bugs) -> TaskSetProof:
    task_set = upload(project, lines(*bugs), environment="code-repair")
    unit = WorkUnit.objects.get(kind=WorkKind.PROVE, ref=task_set.proof.pk)
    work_on(unit.pk, prove)
    return TaskSetProof.objects.get(task_set=task_set)


def test_tasks_are_held_to_their_own_tests_in_a_sandbox(sandboxed):
    project = make_project()
    names = [f"flaky{number}" for number in range(4)]  # of each, one in sixteen times all five runs agree
    flaky = [bug(name, f"import random\ndef {name}(x): return random.choice([1, 2])") for name in names]
    found = proven(project, *BUGS[:4], *flaky, BUGS[4])
    assert (found.state, found.checked) == (ProofState.REFUSED, 9)
    verdicts = {finding["task"]: finding["verdict"] for finding in found.findings}
    seen = {verdicts.pop(name, "holds") for name in names}
    assert "flaky" in seen <= {"flaky", "passes_before", "holds"}
    assert verdicts == {"fixed": "passes_before", "wrong": "reference_fails", "odd": "reference_fails"}
    event = Event.objects.get(project=project, type=EventType.TASK_SET_PROVEN)
    assert (event.data["state"], event.data["refused"]) == ("refused", len(found.findings))
    with pytest.raises(Invalid, match="do not hold"):
        start(project, environment="code-repair", task_set="mine")


def test_a_run_waits_for_the_proof_and_starts_with_what_holds(sandboxed):
    project = make_project()
    task_set = upload(project, lines(*BUGS[:2]), environment="code-repair")
    run = start(project, environment="code-repair", task_set="mine")
    run_advance(run.pk)
    run.refresh_from_db()
    assert run.stages.get().state == StageState.PENDING
    assert run.state_reason.startswith("waits for the proof of task set mine@1")
    work_on(WorkUnit.objects.get(kind=WorkKind.PROVE).pk, prove)
    run_advance(run.pk)
    run.refresh_from_db()
    assert (run.state, run.state_reason) == (RunState.RUNNING, "")
    assert run.stages.get().task_set == task_set


def test_a_proof_goes_on_where_its_slice_ended_and_a_world_that_fails_is_no_verdict(monkeypatch, settings):
    project = make_project()
    ran: list[str] = []

    async def holds(sandbox, task):
        ran.append(task.id)
        if task.id == "held" and ran.count("held") == 1:
            raise WorldError("no space left")
        return await code_repair.prove(lambda solved: passes(solved))

    async def passes(solved):
        return solved

    kept = ENVIRONMENTS["code-repair"]
    monkeypatch.setitem(ENVIRONMENTS, "code-repair", replace(kept, proof=holds))
    proof = proven(project, *BUGS[:2])
    unit = WorkUnit.objects.get(kind=WorkKind.PROVE)
    assert (proof.state, proof.checked, proof.findings) == (ProofState.PENDING, 0, [])
    assert (unit.state, unit.failures) == (WorkState.QUEUED, 1)
    settings.ROLLOUT_SLICE_S = 0
    WorkUnit.objects.update(next_send_at="2020-01-01T00:00Z")
    work_on(unit.pk, prove)
    unit.refresh_from_db()
    assert (unit.state, unit.failures) == (WorkState.QUEUED, 1), "the slice was over before it began: it yields"
    settings.ROLLOUT_SLICE_S = 30
    work_on(unit.pk, prove)
    proof.refresh_from_db()
    assert (proof.state, proof.checked) == (ProofState.PROVEN, 2)


def test_a_set_of_which_too_much_does_not_hold_is_refused_without_running_the_rest(monkeypatch):
    ran: list[str] = []

    async def fails(sandbox, task):
        ran.append(task.id)
        return Proof(ProofVerdict.REFERENCE_FAILS, "no")

    monkeypatch.setitem(ENVIRONMENTS, "code-repair", replace(ENVIRONMENTS["code-repair"], proof=fails))
    monkeypatch.setattr(task_sets, "MAX_FINDINGS", 3)
    found = proven(make_project(), *(bug(f"t{n}", f"def t{n}(x): return {n}") for n in range(9)), BUGS[1])
    assert (found.state, found.checked, len(found.findings)) == (ProofState.REFUSED, 4, 4)
    assert len(ran) == 4


def test_what_ships_needs_no_proof():
    project = make_project()
    tasks = ENVIRONMENTS["code-repair"].build_task_set()
    made = task_set_create(project=project, slug="c", environment="code-repair", tasks=tasks, actor=TESTER)
    assert not TaskSetProof.objects.filter(task_set=made).exists()


async def test_the_tasks_that_ship_for_bug_repair_hold(sandboxed, settings):
    environment = ENVIRONMENTS["bug-repair"]
    task = environment.build_task_set().tasks[0]
    client = SandboxClient(settings.SANDBOX_SOCKET)
    assert (await environment.proof(client, task)).verdict is ProofVerdict.HOLDS
    solution = {**task.reference["solution"], "new": task.reference["solution"]["old"]}
    same = msgspec.structs.replace(task, reference={**task.reference, "solution": solution})
    assert (await environment.proof(client, same)).verdict is ProofVerdict.REFERENCE_FAILS
