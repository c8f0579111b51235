"""Links inside a run's folder that lead out of it: writing through them would change files elsewhere."""

import os
from pathlib import Path

from lmtrain.errors import UserError


def refuse_link_at(path: Path, folder: Path) -> None:
    """Raises UserError if a path to be written resolves to a location outside of `folder`."""
    target, inside = os.path.realpath(path), os.path.realpath(folder)
    if target != inside and not target.startswith(f"{inside}/"):
        raise UserError(f"{path} is a link to {target}, outside of the run's folder: remove it, or move the whole run")


def refuse_links(folder: Path) -> None:
    """Raises UserError if a link inside a run's folder leads out of it, as writing would change files elsewhere.

    Exempt are W&B's links to the log of its service: W&B makes one per start, and later starts do not write to it.
    """
    for place, below, files in os.walk(folder):
        for path in (Path(place) / name for name in (*below, *files)):
            if path.is_symlink() and not path.match("wandb/*run-*/logs/debug-core.log"):
                refuse_link_at(path, folder)
