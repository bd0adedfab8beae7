"""The control of what artefacts and layers refuse: a collector that takes what it finds falls for each trick."""

import concurrent.futures
import os
import subprocess
import sys

import pytest

MOST_FILES, MOST_BYTES = 64, 1 << 20


def collected(folder):
    """What somebody takes who has not thought of it: every file, in the order of the names, up to a number."""
    names = [os.path.join(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names]
    found = {}
    for path in sorted(names)[:MOST_FILES]:
        with open(path, "rb") as file:
            found[os.path.relpath(path, folder)] = file.read(MOST_BYTES)
    return found


@pytest.fixture
def out(tmp_path):
    """A folder of artefacts with a good one, beside a file of the host's."""
    (tmp_path / "host").mkdir()
    (tmp_path / "host/secret").write_text("the host's")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "good").write_text("good")
    assert collected(folder) == {"good": b"good"}
    return folder


def test_a_symlink_leads_out(out):
    (out / "link").symlink_to("../host/secret")
    assert collected(out)["link"] == b"the host's"


def test_a_linked_folder_leads_out(out):
    (out / "folder").symlink_to("../host")
    assert collected(out)["folder/secret"] == b"the host's"


def test_a_hard_link_is_a_file_of_the_host(out):
    os.link(out.parent / "host/secret", out / "link")
    assert collected(out)["link"] == b"the host's"


def test_a_fifo_hangs(out):
    os.mkfifo(out / "pipe")
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        collecting = thread.submit(collected, out)
        with pytest.raises(concurrent.futures.TimeoutError):
            collecting.result(0.3)
        os.close(os.open(out / "pipe", os.O_WRONLY))  # let it go


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_has_no_end(out):
    os.mknod(out / "zero", 0o20600, os.makedev(1, 5))
    assert collected(out)["zero"] == bytes(MOST_BYTES)


def test_a_sparse_file_takes_no_disk_and_fills_the_collector(out):
    with (out / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert (out / "sparse").stat().st_blocks == 0
    assert collected(out)["sparse"] == bytes(MOST_BYTES)


def test_a_deep_tree_has_paths_that_nobody_can_open(out):
    top = os.open(out, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("d" * 200, dir_fd=top)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=top)
        os.close(top)
        top = below
    os.close(os.open("hidden", os.O_WRONLY | os.O_CREAT, dir_fd=top))
    os.close(top)
    assert collected(out) == {"good": b"good"}


def test_a_name_with_a_newline_is_two_lines_of_a_list(out):
    (out / "a\nforged").write_text("")
    assert "forged" in "\n".join(collected(out)).split("\n")


def test_a_name_is_a_command_to_a_terminal(out):
    (out / "\x1b]0;owned\x07").write_text("")
    assert any("\x1b" in name for name in collected(out))


def test_a_flood_crowds_out_the_good_one(out):
    for number in range(20_000):
        os.close(os.open(out / f"{number}", os.O_WRONLY | os.O_CREAT))
    assert "good" not in collected(out)


def test_input_is_pushed_into_a_terminal():
    """The control of `terminal injection`: whoever holds a terminal types on it."""
    push = (
        "import fcntl, os, pty, sys, termios\n"
        "pid, master = pty.fork()\n"
        "if not pid:\n"
        "    for char in 'typed\\n': fcntl.ioctl(0, termios.TIOCSTI, char.encode())\n"
        "    print(sys.stdin.readline().strip().upper(), flush=True)\n"
        "    os._exit(0)\n"
        "seen = b''\n"
        "try:\n"
        "    while chunk := os.read(master, 1000): seen += chunk\n"
        "except OSError: pass\n"
        "os.wait()\n"
        "print('ESCAPED' if b'TYPED' in seen else seen)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", push], capture_output=True, text=True, check=False, timeout=30)
    if "Input/output error" in done.stdout:
        pytest.skip("this kernel lets root alone push input (dev.tty.legacy_tiocsti=0)")
    assert done.stdout == "ESCAPED\n", done
