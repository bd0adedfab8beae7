"""Memory on pages of its own: what lies in it, and that it is gone once nobody holds it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_core.memory import copied, empty_tensor, mapped

ROOT = str(Path(__file__).parents[2])


def resident() -> int:
    """Pages that are no file's."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def test_memory_goes_back_whole_with_its_last_holder_and_counts_as_the_processs_own():
    before = resident()
    held = [empty_tensor((4 << 20,), torch.uint8).fill_(1) for _ in range(8)]
    assert resident() - before >= 30 << 20
    part = held[3][5:9]
    held.clear()
    assert resident() - before < 6 << 20
    assert part.tolist() == [1] * 4


@pytest.mark.parametrize("rows", [0, 3, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_copy_is_contiguous_and_has_the_same_bits(rows, dtype):
    tensor = torch.randn(200, rows).to(dtype).t()
    made = copied(tensor)
    assert (made.dtype, made.shape) == (dtype, tensor.shape)
    assert made.is_contiguous()
    assert made.view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))
    assert mapped(5).tobytes() == bytes(5)


HOLES = """
import sys, torch
from rl_core.memory import give_blocks_back
from test_memory import resident
if sys.argv[1] == "back":
    give_blocks_back()
torch.ones(6 << 20)  # from now on, a heap keeps what is smaller
before = resident()
held = [torch.ones(100_000) for _ in range(100)]
del held[::2]
print(resident() - before)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="another heap does as it likes")
def test_blocks_go_back_from_between_others():
    kept, back = (
        int(
            subprocess.run(
                [sys.executable, "-c", HOLES, how], cwd=Path(__file__).parent, env=os.environ | {"PYTHONPATH": ROOT},
                check=True, capture_output=True, text=True,
            ).stdout
        )
        for how in ("kept", "back")
    )  # fmt: skip
    assert back < 25_000_000 < 35_000_000 < kept
