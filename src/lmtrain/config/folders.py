"""Where the default configs lie."""

from pathlib import Path

from lmtrain.errors import UserError


def conf_dir() -> Path:
    """The folder of default configs: inside the package once installed, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"lmtrain's conf/ is missing (looked beside {package}): reinstall the package.")
