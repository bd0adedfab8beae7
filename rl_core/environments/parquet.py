"""Task sets from Parquet to JSON Lines: `python -m rl_core.environments.parquet < tasks.parquet > tasks.jsonl`.

A process of its own, with bounded memory and time: a file from outside is parsed by native code, and what calls this
keeps its imports small. Columns are `id`, `split`, `input` and `reference`; the last two are structs, or JSON as text.
Exit codes: 0 written, 2 the file is not such a table (stderr says why), 3 pyarrow is not installed.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from importlib import import_module
from typing import Any

MEMORY_BYTES = 4 * 1024**3
PROCESSOR_S = 60
WRITTEN_BYTES = 64 * 1024**2  # a table of few bytes may say one thing a billion times
COLUMNS = ("id", "split", "input", "reference")
REFUSED, NO_PYARROW = 2, 3


def main() -> int:
    """Convert standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S, PROCESSOR_S))
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        return NO_PYARROW
    try:
        table = parquet.ParquetFile(io.BytesIO(sys.stdin.buffer.read()))
        missing = [name for name in COLUMNS[:3] if name not in table.schema_arrow.names]
        if missing:
            raise ValueError(f"the table has no column {', '.join(missing)}; it needs id, split, input, reference")
        wanted = [name for name in COLUMNS if name in table.schema_arrow.names]
        left = WRITTEN_BYTES
        for batch in table.iter_batches(batch_size=256, columns=wanted):
            for row in batch.to_pylist():
                line = json.dumps(_task(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
                left -= len(line)
                if left < 0:
                    raise ValueError(f"its tasks have more than {WRITTEN_BYTES} bytes as JSON Lines")
                sys.stdout.buffer.write(line)
    except (pyarrow.ArrowException, ValueError, TypeError, OSError, MemoryError) as error:
        sys.stderr.write(" ".join(str(error).split())[:300] + "\n")
        return REFUSED
    return 0


def _task(row: dict[str, Any]) -> dict[str, Any]:
    """A row as the task it stands for. A struct's fields that are null are not there: each row has all fields."""
    task = {name: value for name, value in row.items() if value is not None}
    for name in ("input", "reference"):
        if name in task:
            task[name] = json.loads(task[name]) if isinstance(task[name], str) else _present(task[name])
    return task


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
