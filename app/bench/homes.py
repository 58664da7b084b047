"""A home for runs that are thrown away, with the models and keys of the current one."""

import shutil
from pathlib import Path

from cluster.signing import Keyring
from cluster.storage import Home


def beside(current: Home, scratch: Path) -> Home:
    """A new home in the folder `scratch`. What it adds to its models does not get into the current one."""
    home = Home(scratch)
    home.models.mkdir(parents=True)
    for entry in sorted(current.models.iterdir()) if current.models.is_dir() else ():
        if entry.is_dir():
            (home.models / entry.name).symlink_to(entry)
        elif not entry.name.startswith("."):
            shutil.copyfile(entry, home.models / entry.name)
    Keyring(current).ensure()  # a link to nothing would keep a first key from being made
    home.keys.symlink_to(current.keys)
    return home
