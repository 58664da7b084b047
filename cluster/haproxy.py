"""The folder of HAProxy's sockets, with one folder for each cluster inside. What HAProxy is told: `haproxy.sh`."""

import os
import shutil
import socket
import stat
from pathlib import Path

from cluster import environment
from cluster.errors import ConfigError


def prepare_folder() -> None:
    """Make the folder, if HAProxy is used at all, and clear it of clusters that have ended: Ray leaves theirs.

    Raises `ConfigError` if others can write there.
    """
    folder = environment.haproxy_folder()
    if folder is None:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is where HAProxy's sockets belong, but others may write there.",
            hint=f"Remove it, or set {environment.HAPROXY_SWITCH}=0.",
        )
    for admin in folder.glob("*/admin.sock"):
        if _is_deserted(admin):
            shutil.rmtree(admin.parent, ignore_errors=True)


def _is_deserted(path: Path) -> bool:
    """Whether the process that listened there is gone. In doubt, it is not."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False
