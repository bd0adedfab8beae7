"""The modules of this folder as one program for a sandbox's Python. Used outside, at sandboxd's start."""

from __future__ import annotations

import marshal
from pathlib import Path
from typing import Final

_PACKAGE: Final = __package__
# Each after those that it imports.
_MODULES: Final = ("confine", "collect", "tree", "program", "command", "services", "supervisor")

# What `python3 -c` gets; its arguments are the descriptor and the size of the packed modules, the descriptor of the
# control socket, and whether there is Landlock.
LOADER: Final = f"""
import marshal, os, sys
package = sys.modules[{_PACKAGE!r}] = type(sys)({_PACKAGE!r})
source, size = map(int, sys.argv[1:3])
data = b""
while len(data) < size:
    data += os.read(source, size - len(data))
for name, code in marshal.loads(data):
    module = sys.modules[package.__name__ + "." + name] = type(sys)(name)
    exec(code, module.__dict__)
    setattr(package, name, module)
package.supervisor.main(int(sys.argv[3]), sys.argv[4] == "1")
"""


def packed() -> bytes:
    """The compiled modules, marshalled."""
    folder = Path(__file__).parent
    modules = []
    for name in _MODULES:
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        modules.append((name, compile(text, f"<sandbox {name}>", "exec", dont_inherit=True, optimize=2)))
    return marshal.dumps(modules)
