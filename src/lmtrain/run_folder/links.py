"""Links in a run's folder: a run writes into its own folder only, whoever made that."""

import os
from pathlib import Path

from lmtrain.errors import UserError


def refuse_at(path: Path, folder: Path) -> None:
    """The same of one path of a run's folder, which is to be written to."""
    target, inside = os.path.realpath(path), os.path.realpath(folder)
    if target != inside and not target.startswith(f"{inside}/"):
        raise UserError(
            f"{path} is a link to {target}, outside of the run's folder, which would be written there: remove the "
            f"link, or put the whole run where there is room (run.root)"
        )


def refuse(folder: Path) -> None:
    """Raises UserError where a link below a run's folder leads out of it, where other files would be written."""
    for place, below, files in os.walk(folder):
        for path in (Path(place) / name for name in (*below, *files)):
            if path.is_symlink():
                refuse_at(path, folder)
