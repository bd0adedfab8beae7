"""How a server is started without root's rights.

PostgreSQL refuses to run as root. As root we therefore start it as `nobody`; where a folder on the way to its files is
closed to that user (a clone under /root, say) the files are bound to an open path inside a mount namespace of its own,
so that no permission outside is touched.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from controlplane.processes.errors import ServiceFailed

_USER = "nobody"
_BIND_SCRIPT = """
set -e
mount -t tmpfs -o mode=755,size=1m tmpfs "$1"; where=$1; count=$2; shift 2
while [ "$count" -gt 0 ]; do
  mkdir "$where/$count"; mount --bind "$1" "$where/$count"; shift; count=$((count - 1))
done
exec "$@"
"""


class Launcher:
    """Turns a command over some folders into one that runs unprivileged, and translates the folders' paths for it."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises: ServiceFailed when this machine offers no way to reach the folders without root's rights."""
        self._folders = [folder.resolve() for folder in folders]
        self._prefix: list[str] = []
        self._mapped: dict[Path, Path] = {}
        if os.geteuid() == 0:
            self._drop_root()

    def path(self, path: Path) -> str:
        """The path as the started command sees it."""
        path = path.resolve()
        for folder, mapped in self._mapped.items():
            if path.is_relative_to(folder):
                return str(mapped / path.relative_to(folder))
        return str(path)

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` unprivileged. Its process number stays the same to the end."""
        return [*self._prefix, *argv]

    def hand_over(self, folder: Path) -> None:
        """Give a folder and all in it to the user that the command runs as; readable by that user alone."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.geteuid() == 0:
            user = pwd.getpwnam(_USER)
            for parent, _, files in os.walk(folder):
                for path in (parent, *(os.path.join(parent, file) for file in files)):
                    os.lchown(path, user.pw_uid, user.pw_gid)
        elif folder.stat().st_uid != os.geteuid():
            raise ServiceFailed(
                f"{folder} belongs to another user; run this as that user, or use another state folder (SLIPWAY_STATE)"
            )
        folder.chmod(0o700)

    def _drop_root(self) -> None:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ServiceFailed(
                "PostgreSQL does not run as root, and setpriv is missing; apt-get install util-linux, run as another "
                "user, or set DATABASE_URL and REDIS_URL to servers of your own"
            )
        user = pwd.getpwnam(_USER)
        drop = [setpriv, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--inh-caps=-all", "--"]
        if self._reachable(drop):
            self._prefix = drop
            return
        where = Path("/mnt") if Path("/mnt").is_dir() else Path("/tmp")  # noqa: S108  hidden under our own tmpfs
        count = len(self._folders)
        self._mapped = {folder: where / str(count - i) for i, folder in enumerate(self._folders)}
        bind = ["sh", "-c", _BIND_SCRIPT, "bind", str(where), str(count), *map(str, self._folders)]
        self._prefix = ["unshare", "--mount", "--propagation", "private", "--", *bind, *drop]
        probe = subprocess.run([*self._prefix, "true"], capture_output=True, text=True, check=False)
        if probe.returncode != 0:
            raise ServiceFailed(
                f"PostgreSQL does not run as root, user {_USER} cannot reach {self._folders[0]}, and this container "
                f"allows no mount namespace ({probe.stderr.strip()}); run as an ordinary user, put the clone under a "
                "folder that others may enter, or set DATABASE_URL and REDIS_URL to servers of your own"
            )

    def _reachable(self, drop: Sequence[str]) -> bool:
        tests = [*drop, "sh", "-c", 'for folder; do cd "$folder" || exit 1; done', "test"]
        return subprocess.run([*tests, *map(str, self._folders)], capture_output=True, check=False).returncode == 0
