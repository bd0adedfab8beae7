import subprocess
import sys

from benchmarks.__main__ import _with_section, names
from benchmarks.measure import host, interleaved_medians


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_an_unknown_name_lists_the_known_ones():
    done = run("nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nonsense" in done.stderr
    assert ", ".join(names()) in done.stderr


def test_no_name_at_all_is_an_error_too():
    assert run().returncode == 2


def test_only_modules_with_a_run_are_benchmarks():
    assert "delta" in names()
    assert not {"measure", "__main__"} & set(names())


def test_candidates_take_turns_and_the_median_is_taken():
    order = []
    ticks = iter([0.0, 1.0, 0.0, 10.0, 0.0, 2.0, 0.0, 20.0, 0.0, 99.0, 0.0, 30.0])
    medians = interleaved_medians(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        repeats=3,
        clock=lambda: next(ticks),
        warmup=False,
    )
    assert order == ["a", "b"] * 3
    assert medians == {"a": 2.0, "b": 20.0}


RESULT = {"date": "2026-11-30 10:00 UTC", "ratio": 12.3456789, "missing": ["peer"], "host": host(), "seconds": 1.5}


def test_results_are_a_table_for_each_benchmark():
    text = _with_section("", "delta", RESULT)
    assert text.startswith("# Benchmark results\n\nWritten by")
    assert "## delta" in text
    assert f"2026-11-30 10:00 UTC on {host()['model']}, {host()['cores']} cores, 1.5 s." in text
    assert "| `ratio` | 12.35 |" in text
    assert "| `missing` | peer |" in text
    assert "| `host`" not in text


def test_a_run_leaves_the_other_sections_as_they_are():
    text = _with_section("", "delta", RESULT)
    both = _with_section(text, "conductor", RESULT | {"ratio": 1.0})
    assert both.index("## conductor") < both.index("## delta")
    assert both.endswith(text[text.index("## delta") :])
    again = _with_section(both, "delta", RESULT | {"ratio": 2.0})
    assert again.count("## ") == 2
    assert "| `ratio` | 1 |" in again
    assert "| `ratio` | 2 |" in again
    assert _with_section(again, "delta", RESULT) == both
    assert "## gone" not in _with_section(f"{both}\n## gone\n\n| `ratio` | 3 |\n", "delta", RESULT)
