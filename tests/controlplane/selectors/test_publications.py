"""What a reader is told of what stands in the store."""

import pytest
from django.utils import timezone

from controlplane.models import PolicyVersion, Publication
from controlplane.selectors.publications import line_of, publications_towards
from controlplane.services.runs import run_create
from controlplane.services.versions import PublishedWeights, version_begin, version_commit
from controlplane.states import PublicationKind
from rl_core.types import WeightFormat
from tests.domain_factories import TESTER, make_run, make_spec


def grow(run, count):
    """Commit `count` versions after the head of the run's lineage; they are returned, the head before them first."""
    lineage = run.lineage
    lineage.refresh_from_db()
    versions = [lineage.head]
    for _ in range(count):
        head = versions[-1]
        begun = version_begin(lineage=lineage, epoch=0, number=head.number + 1, parent=head, fence=1)
        weights = PublishedWeights(
            root=f"{begun.depth:064x}",
            manifest_key=f"lineages/{lineage.pk}/{begun.number}/manifest.json",
            delta_bytes=10,
            full_bytes=1000,
            changed_elements=1,
            elements=500,
        )
        versions.append(version_commit(version=begun, fence=1, weights=weights, run=run, actor=TESTER))
    return versions


def fork(run, version):
    return run_create(project=run.project, name="fork", spec=make_spec(), actor=TESTER, parent_version=version)


def skip(version, base, **values):
    row = {"kind": PublicationKind.SKIP, "published_at": timezone.now(), "root": version.root, "base_root": base.root}
    key = f"skip/{base.depth}-{version.depth}"
    return Publication.objects.create(version=version, base_version=base, **{**row, "manifest_key": key, **values})


@pytest.mark.django_db
def test_every_commit_records_what_it_published():
    run = make_run()
    first, second = grow(run, 1)
    whole, delta = Publication.objects.order_by("created_at")
    assert (whole.kind, whole.version, whole.manifest_key) == (PublicationKind.SNAPSHOT, first, first.manifest_key)
    assert (whole.base_version, whole.root, whole.base_root) == (None, first.root, "")
    assert (delta.kind, delta.version, delta.base_version) == (PublicationKind.DELTA, second, first)
    assert (delta.root, delta.base_root, delta.bytes) == (second.root, first.root, 10)


@pytest.mark.django_db
def test_a_delta_from_another_version_than_the_parent_is_recorded_as_what_it_is():
    run = make_run()
    versions = grow(run, 2)
    begun = version_begin(lineage=run.lineage, epoch=1, number=3, parent=versions[2], fence=1)
    weights = PublishedWeights(
        root="c" * 64, manifest_key="m", delta_bytes=1, full_bytes=9, changed_elements=1, elements=4, base=versions[1]
    )
    made = version_commit(version=begun, fence=1, weights=weights, run=run, actor=TESTER)
    delta = made.publications.get()
    assert (delta.base_version, delta.base_root, made.depth) == (versions[1], versions[1].root, 3)


@pytest.mark.django_db
def test_the_line_goes_on_over_forks_and_depth_with_it():
    run = make_run()
    versions = grow(run, 3)
    branch = fork(run, versions[2])
    grown = grow(branch, 2)
    assert [version.depth for version in grown] == [2, 3, 4]
    line = [grown[2], grown[1], grown[0], versions[2], versions[1], versions[0]]
    assert line_of(grown[2]) == [(version.pk, version.depth) for version in line]
    assert [depth for _, depth in line_of(grown[2], back_to=3)] == [4, 3]
    assert not grown[0].publications.exists()  # the parent's are its own


@pytest.mark.django_db
def test_skips_towards_a_version_are_offered_nearest_first_and_no_others():
    run = make_run()
    versions = grow(run, 6)
    branch = grow(fork(run, versions[4]), 2)
    far, near = skip(versions[4], versions[0]), skip(branch[2], versions[2])
    skip(versions[6], versions[4])  # does not lead to the branch
    skip(versions[3], versions[1], deleted_at=timezone.now())
    skip(versions[2], versions[0], published_at=None, manifest_key="")
    skip(branch[2], versions[0], format=WeightFormat.MXFP4)
    assert publications_towards(branch[2]) == [near.manifest_key, far.manifest_key]
    assert publications_towards(branch[2], since=versions[1]) == [near.manifest_key]
    assert publications_towards(branch[2], WeightFormat.MXFP4) == ["skip/0-6"]
    assert publications_towards(PolicyVersion.objects.get(pk=versions[1].pk)) == []
