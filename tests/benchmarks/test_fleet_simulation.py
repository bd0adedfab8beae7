"""The fleet's simulation against values computed by hand, bounds that nothing can beat, and what must be conserved."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet_codecs import committed, formats, newest, on_line, renew
from benchmarks.fleet_day import DAY_S, Prices, day_of, step_ends
from benchmarks.fleet_events import Clock, Server, SharedLink, max_min
from benchmarks.fleet_scale import carried, paged, plant, report
from benchmarks.fleet_sync import Ahead, ClusterSite, Format, Hosts, Plant, sync

ONE = Hosts(hosts=1, threads=1)


def small_plant(**changes) -> Plant:
    """A model of 1000 bytes, one host, one cluster; everything that is not named is free."""
    site = ClusterSite(name="a", link_bytes_s=math.inf, hosts=ONE)
    return replace(
        Plant(model_bytes=1000.0, encoders=ONE, uplink_bytes_s=math.inf, clusters=(site,)),
        **changes,
    )


def a_format(**changes) -> Format:
    free = Format(name="x", ratio=10.0, encode_bytes_s=math.inf, decode_bytes_s=math.inf, segment_bytes=100.0)
    return replace(free, **changes)


def test_a_server_does_one_job_at_a_time_in_order():
    clock, done = Clock(), []
    server = Server(clock)
    for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 0.5)):
        server.ask(seconds, lambda name=name: done.append((name, clock.now_s)))
    clock.run()
    assert done == [("a", 2.0), ("b", 3.0), ("c", 3.5)]
    assert server.busy_s == 3.5


@pytest.mark.parametrize(
    ("capacity", "caps", "rates"),
    [
        (10.0, [4.0, 4.0], [4.0, 4.0]),
        (10.0, [8.0, 2.0], [8.0, 2.0]),
        (10.0, [9.0, 2.0, 9.0], [4.0, 2.0, 4.0]),
        (math.inf, [3.0, 5.0], [3.0, 5.0]),
        (10.0, [], []),
    ],
)
def test_a_capacity_is_shared_fairly(capacity, caps, rates):
    assert max_min(capacity, caps) == rates


def test_a_flow_speeds_up_when_another_ends():
    """10 bytes/s: two flows of 20 and 50 have 5 each until 4 s; the second's other 30 then go at 10 until 7 s."""
    clock, ends = Clock(), {}
    link = SharedLink(clock, 10.0)
    for size in (20.0, 50.0):
        link.send(size, cap_bytes_s=10.0, then=lambda size=size: ends.update({size: clock.now_s}))
    clock.run()
    assert ends == {20.0: pytest.approx(4.0), 50.0: pytest.approx(7.0)}
    assert link.sent == 70.0


def test_one_segment_passes_every_stage_once():
    """1000 bytes: encode and hash 1 + 2 s; 100 bytes up 4 s; commit 0.5 s beside down 5 + 0.25 s, share 3, decode 1,
    hash 2, swap 0.125."""
    site = ClusterSite(name="a", link_bytes_s=20.0, rtt_s=0.25, replicas=4, lan_bytes_s=100.0, hosts=ONE)
    where = small_plant(uplink_bytes_s=25.0, clusters=(site,), hash_bytes_s=500.0, commit_s=0.5, swap_s=0.125)
    synced = sync(where, a_format(encode_bytes_s=1000.0, decode_bytes_s=1000.0))
    assert synced.segments == 1
    assert synced.published_s == pytest.approx(3 + 4 + 0.5)
    assert synced.sync_s == pytest.approx(3 + 4 + 5 + 0.25 + 3 + 1 + 2 + 0.125)
    assert synced.busy_s == {"encode": 3.0, "upload": 4.0, "cores a": 3.0}


def test_what_waits_for_answers_is_that_much_later():
    """Ten segments of 10 bytes: up 1 + 0.5 s each; down 2 s and three windows of 4 bytes at 0.25 s, one by one."""
    site = ClusterSite(name="a", link_bytes_s=5.0, rtt_s=0.25, window_bytes=4.0, hosts=ONE)
    where = small_plant(uplink_bytes_s=10.0, uplink_rtt_s=0.5, clusters=(site,), ahead=Ahead.FETCH)
    synced = sync(where, a_format(segment_bytes=10.0))
    assert synced.published_s == pytest.approx(10 * 1.5)
    assert synced.sync_s == pytest.approx(1.5 + 10 * (2 + 3 * 0.25))
    free = replace(where, clusters=(replace(site, window_bytes=math.inf),))
    assert sync(free, a_format(segment_bytes=10.0)).sync_s == pytest.approx(1.5 + 10 * 2 + 0.25)


def test_what_is_done_ahead_need_not_be_done_after_the_commit():
    """Ten segments of 1 s up, 1 s down and 0.5 s to decode each, and a commit of 2 s."""
    where = small_plant(
        uplink_bytes_s=10.0, clusters=(ClusterSite(name="a", link_bytes_s=10.0, hosts=ONE),), commit_s=2.0
    )
    form = a_format(segment_bytes=10.0, decode_bytes_s=200.0)
    found = {ahead: sync(replace(where, ahead=ahead), form) for ahead in Ahead}
    assert [one.published_s for one in found.values()] == [pytest.approx(10 + 2)] * 3
    # The first is fetched after the commit, and each is decoded while the next is fetched.
    assert found[Ahead.NOTHING].sync_s == pytest.approx(12 + 10 + 0.5)
    # The last came down one second before the commit.
    assert found[Ahead.FETCH].sync_s == pytest.approx(12 + 10 * 0.5)
    assert found[Ahead.DECODE].sync_s == pytest.approx(12)


def test_what_comes_down_after_the_commit_follows_what_came_before():
    """Ten segments of 1 s up and 3 s down each: at 10 s three are there, and the others take 3 s each."""
    where = small_plant(uplink_bytes_s=10.0, clusters=(ClusterSite(name="a", link_bytes_s=10 / 3, hosts=ONE),))
    assert sync(where, a_format(segment_bytes=10.0, decode_bytes_s=200.0)).sync_s == pytest.approx(1 + 30 + 0.5)


def test_the_slowest_stage_sets_the_pace():
    """Ten segments of 100 model bytes. Each stage but the slowest is passed once, the slowest ten times."""
    sites = (ClusterSite(name="a", link_bytes_s=100.0, hosts=ONE),)
    stages = {"encode": 0.1, "upload": 0.1, "download": 0.1, "decode": 0.1}
    for slowest in stages:
        pace = {**stages, slowest: 1.0}
        where = small_plant(
            uplink_bytes_s=10 / pace["upload"],
            clusters=(replace(sites[0], link_bytes_s=10 / pace["download"]),),
            ahead=Ahead.DECODE,
        )
        form = a_format(encode_bytes_s=100 / pace["encode"], decode_bytes_s=100 / pace["decode"], segment_bytes=10.0)
        assert sync(where, form).sync_s == pytest.approx(10 * 1.0 + 3 * 0.1), slowest


def test_hosts_encode_their_shards_beside_each_other():
    where = small_plant(encoders=Hosts(hosts=4, threads=5))
    assert sync(where, a_format(encode_bytes_s=10.0)).sync_s == pytest.approx(1000 / 10 / 20)


def test_a_store_that_gives_less_holds_all_clusters_up():
    sites = tuple(ClusterSite(name=name, link_bytes_s=100.0, hosts=ONE) for name in "abcd")
    free = sync(small_plant(clusters=sites), a_format())
    assert free.serving_s == dict.fromkeys("abcd", pytest.approx(1.0))
    held = sync(small_plant(clusters=sites, egress_bytes_s=50.0), a_format())
    assert held.serving_s == dict.fromkeys("abcd", pytest.approx(4 * 100 / 50))


plants = st.builds(
    lambda hosts, uplink, links, egress, hashing, window, ahead: Plant(
        model_bytes=1e4,
        encoders=Hosts(hosts=hosts, threads=2),
        uplink_bytes_s=uplink,
        clusters=tuple(
            ClusterSite(name=str(number), link_bytes_s=link, rtt_s=0.01, replicas=2, lan_bytes_s=500.0, hosts=ONE)
            for number, link in enumerate(links)
        ),
        egress_bytes_s=egress,
        hash_bytes_s=hashing,
        ahead_segments=window,
        ahead=ahead,
        commit_s=0.1,
        swap_s=0.5,
    ),
    hosts=st.integers(1, 5),
    uplink=st.floats(10, 1000),
    links=st.lists(st.floats(10, 1000), min_size=1, max_size=4),
    egress=st.floats(10, 4000),
    hashing=st.floats(100, 1e5),
    window=st.integers(1, 8),
    ahead=st.sampled_from(Ahead),
)
forms = st.builds(
    lambda ratio, encode, decode, segment: Format(
        name="x", ratio=ratio, encode_bytes_s=encode, decode_bytes_s=decode, segment_bytes=segment
    ),
    ratio=st.floats(1, 50),
    encode=st.floats(100, 1e5),
    decode=st.floats(100, 1e5),
    segment=st.floats(50, 1000),
)


@settings(max_examples=60, deadline=None)
@given(where=plants, form=forms)
def test_nothing_is_lost_and_nothing_is_faster_than_its_parts(where, form):
    synced = sync(where, form)
    size = where.model_bytes / form.ratio
    assert synced.uploaded_bytes == pytest.approx(size)
    assert list(synced.downloaded_bytes.values()) == [pytest.approx(size)] * len(where.clusters)
    assert synced.egress_bytes == pytest.approx(size * len(where.clusters))
    hashing = where.model_bytes / where.hash_bytes_s
    encode_s = (where.model_bytes / form.encode_bytes_s + hashing) / where.encoders.workers
    upload_s = size / where.uplink_bytes_s
    assert synced.busy_s["encode"] == pytest.approx(encode_s)
    assert synced.busy_s["upload"] == pytest.approx(upload_s)
    egress_s = size * len(where.clusters) / where.egress_bytes_s
    for site in where.clusters:
        download_s, decode_s = size / site.link_bytes_s, where.model_bytes / form.decode_bytes_s + hashing
        assert synced.busy_s[f"cores {site.name}"] == pytest.approx(decode_s)
        after_swap = synced.serving_s[site.name] - where.swap_s
        assert after_swap >= max(encode_s, upload_s, download_s, decode_s) * (1 - 1e-9)
        one_by_one = encode_s + upload_s + download_s + egress_s + decode_s + size / site.lan_bytes_s
        assert after_swap <= one_by_one + where.commit_s + site.rtt_s * synced.segments
    assert max(synced.serving_s.values()) >= egress_s
    assert synced.most_waiting["encoded"] <= where.ahead_segments
    assert all(synced.most_waiting[site.name] <= where.ahead_segments * site.hosts.hosts for site in where.clusters)


def test_ratios_lie_on_lines_through_what_was_measured():
    points = [(0.01, 100.0), (0.1, 10.0), (1.0, 5.0)]
    assert on_line(points, 0.1) == pytest.approx(10.0)
    assert on_line(points, 0.0316227766) == pytest.approx(31.6227766)
    assert on_line(points, 0.001) == pytest.approx(1000.0)
    assert on_line(points, 10.0) == pytest.approx(2.5)


def test_a_newer_measurement_is_taken_when_it_is_whole(tmp_path, monkeypatch):
    kept = tmp_path / "delta.json"
    monkeypatch.setattr("benchmarks.fleet_codecs.MEASURED", kept)
    assert newest() == (committed(), "benchmarks/data/codec.json")
    kept.write_text('{"quick": false, "memcpy_gb_s": 1.0}')
    assert newest()[1] == "benchmarks/data/codec.json"
    text = Path("benchmarks/data/codec.json").read_text()
    kept.write_text(text)
    assert newest() == (committed(), str(kept))
    kept.write_text(text.replace("{", '{"quick": true,', 1))
    assert newest()[1] == "benchmarks/data/codec.json"


def test_the_newest_measurement_is_kept_with_its_date(tmp_path, monkeypatch):
    kept, found = tmp_path / "codec.json", tmp_path / "delta.json"
    monkeypatch.setattr("benchmarks.fleet_codecs.COMMITTED", kept)
    monkeypatch.setattr("benchmarks.fleet_codecs.MEASURED", found)
    before = json.loads(Path("benchmarks/data/codec.json").read_text())
    kept.write_text(json.dumps(before))
    found.write_text(json.dumps(before | {"date": "today", "small_ratio_1e6": 123.456789, "peak_rss_mb": 7.0}))
    renew()
    after = json.loads(kept.read_text())
    assert (after["date"], after["small_ratio_1e6"]) == ("today", 123.5)
    assert after.keys() == before.keys()


def test_tables_take_each_others_place_on_the_page():
    page = "above\n<!-- tables -->\n\nold\n\n<!-- end of tables -->\nbelow\n"
    assert paged(page, "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="unpack"):
        paged("without marks", "new\n")


def test_a_day_of_versions_by_hand():
    """Steps end at 100, 200, ...; a version is served 30 s after: 30 s of every 100 are one version behind."""
    where = small_plant(uplink_bytes_s=5.0, swap_s=10.0)
    synced = sync(where, a_format())
    assert (synced.published_s, synced.sync_s) == (20.0, 30.0)
    ends = [100.0 * number for number in range(1, 865) if 100.0 * number < DAY_S]
    day = day_of(where, a_format(), synced, ends, prices=Prices(egress_gb=1e9, put_1000=0.0, get_1000=0.0))
    assert (day.versions, day.published, day.served) == (863, 863, 863)
    assert day.lag_mean == pytest.approx(0.3 * 863 / 864)
    assert day.behind_s == pytest.approx(100 * 0.3 * 863 / 864)
    assert day.lag_most == 1
    assert day.paused_s == 8630.0
    assert day.egress_bytes == 863 * 100.0
    assert day.dollars == pytest.approx(863 * 100.0)


def test_who_is_slower_than_the_steps_skips_versions():
    """Steps end each 100 s and publishing takes 250 s: of ten versions the 1st, 3rd, 6th, 8th and 10th are published.

    From 800 to 850 s the 8th is the newest and the 3rd is served.
    """
    where = small_plant(uplink_bytes_s=0.4)
    synced = sync(where, a_format())
    assert synced.published_s == 250.0
    day = day_of(where, a_format(), synced, [100.0 * n for n in range(1, 11)], prices=Prices())
    assert day.published == 5  # begun at 100, 350, 600, 850 and 1100
    assert day.lag_most == 5


def test_steps_take_between_the_shortest_and_the_longest():
    ends = step_ends(shortest_s=300.0, longest_s=900.0, seed=1)
    durations = [after - before for before, after in zip([0.0, *ends], ends, strict=False)]
    assert all(300 <= duration <= 900 for duration in durations)
    assert 120 < len(ends) < 170
    assert ends[-1] < DAY_S <= ends[-1] + 900


@pytest.mark.parametrize(("ahead", "within_s"), [(Ahead.NOTHING, 20), (Ahead.FETCH, 14), (Ahead.DECODE, 10)])
def test_how_soon_ours_is_there_at_25_gbit(ahead, within_s):
    where = replace(plant(committed(), gbit=25), ahead=ahead)
    assert where.encoders.hosts == 64
    form, synced = carried(where, committed(), "ours")
    assert synced.sync_s <= within_s
    assert synced.uploaded_bytes == pytest.approx(2.08e12 / formats(committed(), density=0.02)[form.name].ratio)


def test_the_page_shows_what_the_command_prints():
    assert report(committed()) in Path("docs/scale.md").read_text()
