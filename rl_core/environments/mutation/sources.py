"""What is mutated: pure-Python modules of the standard library, and small permissive packages that are installed.

Nothing is imported here: files are read, and a licence is read from the package's own metadata.
"""

from __future__ import annotations

import ast
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import cast

MAX_FILE_BYTES = 90_000
MAX_PACKAGE_BYTES = 150_000
MIN_LINES = 25

# Pure Python that answers calls with values, and does not live on files, sockets, threads or the clock.
STANDARD_MODULES = (
    "ast", "base64", "bisect", "calendar", "colorsys", "configparser", "copy", "csv", "dataclasses", "difflib",
    "email.quoprimime", "email.utils", "email._parseaddr", "encodings.punycode", "fnmatch", "fractions", "functools",
    "getopt", "graphlib", "gettext", "heapq", "html", "http.cookies", "inspect", "ipaddress",
    "json", "mimetypes", "nturl2path", "operator", "pickletools", "plistlib", "pprint", "quopri",
    "reprlib", "sched", "shlex", "statistics", "string", "stringprep", "textwrap", "tokenize", "tomllib",
    "urllib.parse", "uuid", "wsgiref.util", "wsgiref.headers", "xml.sax.saxutils", "optparse",
    "argparse", "bdb", "cgi", "linecache", "locale", "netrc",
)  # fmt: skip
# A package that asks for one of these acts on the world outside it.
OUTSIDE = frozenset(
    ("asyncio", "ctypes", "multiprocessing", "select", "selectors", "signal", "socket", "ssl", "subprocess")
)
# Modules in C that stand in for Python code of the same name, and would hide what was changed in it.
TWINS = ("_bisect", "_csv", "_functools", "_heapq", "_json", "_operator", "_statistics")
_NEEDED = {"csv": "_csv"}  # there is no Python code without it

_PERMISSIVE = re.compile(
    r"(mit(-0)?|(new )?bsd|bsd-[23]-clause|0bsd|apache-2\.0|psf-2\.0|python-2\.0|isc|isc license( \(iscl)?|zlib|"
    r"unlicense|cc0-1\.0|mit license|(new )?bsd license|bsd [23]-clause license|apache|apache 2\.0|apache license 2\.0|"
    r"apache software license|python software foundation license|bsd 3-clause)"
)


@dataclass(frozen=True)
class Source:
    """A repository to make tasks of: files by path, its importable modules, and where it comes from.

    `blocked` are C twins that must not be importable when its tests run.
    """

    name: str
    origin: str
    licence: str
    files: dict[str, str]
    modules: dict[str, str]
    blocked: tuple[str, ...] = ()

    @property
    def roots(self) -> list[str]:
        """The names that an import statement starts with."""
        return sorted({name.split(".")[0] for name in self.modules})


def find_sources(names: Iterable[str] = ()) -> list[Source]:
    """Every source of this installation, by name; or those named."""
    found = [*_standard_library(), *_installed()]
    wanted = set(names)
    unknown = wanted - {source.name for source in found}
    if unknown:
        raise ValueError(f"no such source: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in found)}")
    return sorted((s for s in found if not wanted or s.name in wanted), key=lambda source: source.name)


def _standard_library() -> Iterator[Source]:
    library = Path(sysconfig.get_path("stdlib"))
    origin, licence = f"Python {platform.python_version()}", _read(library / "LICENSE.txt")
    for name in STANDARD_MODULES:
        path = library / name.replace(".", "/")
        if (path / "__init__.py").is_file():
            files = _python_files(path, prefix=f"{name}/")
        else:
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            files = {f"{name.replace('.', '_')}.py": _read(file)} if file.is_file() else {}
        if not files or (_relative(files) and len(files) == 1) or not _fits(files):
            continue
        if f"_{name}" in {*TWINS} & {*sys.builtin_module_names}:
            continue  # its twin is part of the interpreter: no world without the original can be had
        blocked = tuple(twin for twin in TWINS if _NEEDED.get(name) != twin)
        yield Source(name, origin, "PSF-2.0", _with_licence(files, licence), modules_of(files), blocked)


def _installed() -> Iterator[Source]:
    for distribution in sorted(metadata.distributions(), key=lambda d: d.metadata["Name"].lower()):
        licence = permissive_licence(cast("Message", distribution.metadata))
        files = distribution.files or []
        native = any(file.suffix in (".so", ".pyd") for file in files)
        if not licence or native or distribution.metadata["Name"] == "slipway" or _requires(distribution):
            continue
        texts = {
            str(file): _read(Path(str(distribution.locate_file(file))))
            for file in files
            if file.suffix == ".py" and ".." not in file.parts and not _is_test(file)
        }
        texts = {name: text for name, text in texts.items() if text}
        if not texts or not _fits(texts) or any(OUTSIDE & _imports(text) for text in texts.values()):
            continue
        terms = [file for file in files if re.match(r"(?i)(licen[cs]e|copying)", file.name)]
        text = "\n\n".join(_read(Path(str(distribution.locate_file(file)))) for file in terms)
        name = distribution.metadata["Name"].lower()
        origin = f"{name} {distribution.version}"
        if text:  # these licences ask that their text stays with the code
            yield Source(name, origin, licence, _with_licence(texts, text), modules_of(texts))


def permissive_licence(about: Message) -> str:
    """The licence that a package declares, where every part of it is permissive; else nothing."""
    classifiers = [c.split("::")[-1].strip() for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    declared = [about.get("License-Expression"), about.get("License"), *classifiers]
    stated = [text.strip() for text in declared if text and "\n" not in text.strip()]
    parts = [part.strip(" ()").lower() for text in stated for part in re.split(r"\bOR\b|\bAND\b", text)]
    known = [part for part in parts if part not in ("dual license", "osi approved", "dfsg approved")]
    return stated[0] if known and all(_PERMISSIVE.fullmatch(part) for part in known) else ""


def _requires(distribution: metadata.Distribution) -> bool:
    """Whether it needs another package: a sandbox has none."""
    return any("extra ==" not in line and "python_version" not in line for line in distribution.requires or [])


def _imports(text: str) -> set[str]:
    """First words of the modules that a file imports, anywhere in it."""
    return set(re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.M))


def _is_test(file: PurePosixPath) -> bool:
    return bool({"tests", "test", "testing"} & set(file.parts)) or file.name.startswith("test_")


def _python_files(folder: Path, *, prefix: str) -> dict[str, str]:
    return {prefix + str(path.relative_to(folder)): _read(path) for path in sorted(folder.rglob("*.py"))}


def _read(path: Path) -> str:
    """A text file, or nothing where it cannot be read as one."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return ""


def _with_licence(files: dict[str, str], text: str) -> dict[str, str]:
    return {**files, "LICENSE": text} if text else files


def _relative(files: dict[str, str]) -> bool:
    """Whether a lone file imports its neighbours."""
    return any(re.search(r"^\s*from \.", text, re.M) for text in files.values())


def _fits(files: dict[str, str]) -> bool:
    sizes = [len(text.encode()) for text in files.values()]
    lines = sum(text.count("\n") for text in files.values())
    return max(sizes) <= MAX_FILE_BYTES and sum(sizes) <= MAX_PACKAGE_BYTES and lines >= MIN_LINES


def modules_of(files: dict[str, str]) -> dict[str, str]:
    """Importable names and their files; what cannot be parsed, or is not meant to be imported, is left out."""
    found = {}
    for path, text in sorted(files.items()):
        name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        parts = name.split(".")
        if all(part.isidentifier() for part in parts) and parts[-1] != "__main__" and _parses(text):
            found[name] = path
    return found


def _parses(text: str) -> bool:
    try:
        parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def parse(text: str) -> ast.Module:
    """A syntax tree, without the compiler's remarks on other people's code. Raises: SyntaxError, ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)
