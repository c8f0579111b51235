"""lmtrain's default configs: the location of conf/, the options of its groups, and the help on a command's own keys."""

from collections.abc import Iterable
from pathlib import Path

from lmtrain.errors import UserError

PARTS = ("base", "common")  # files in a group's folder that its options are based on; no options themselves


def conf_dir() -> Path:
    """Returns the folder of default configs: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"lmtrain's conf/ is missing (looked beside {package}): reinstall the package.")


def options_of(group: str, folders: Iterable[Path]) -> list[str]:
    """Returns the sorted options of a config group in these folders."""
    return sorted({f.stem for d in folders for f in (d / group).glob("*.yaml") if f.stem not in PARTS})


def own_keys(verb: str, conf: Path) -> list[tuple[str, str]]:
    """Returns (key=default, description) for each key of the command's own section; empty if it has none."""
    file = conf / verb / "default.yaml"
    if not file.is_file():
        return []
    pairs = [line.partition(" # ") for line in file.read_text(encoding="utf-8").splitlines() if line[:1].isalpha()]
    rows = [(f"{verb}.{set_.replace(': ', '=', 1).strip()}", about) for set_, _, about in pairs]
    return [("run_dir=outputs/NAME", "a run's folder"), *rows] if verb in ("export", "generate") else rows


def verb_help(verb: str, conf: Path) -> str:
    """Returns help on the command's own keys and examples, each part after an empty line; '' if there is neither."""
    import yaml  # here, because this module is imported before the first line that a command prints

    keys = own_keys(verb, conf)
    width = max((len(key) for key, _ in keys), default=0)
    lines = ["", "its own keys:", *(f"  {key:<{width}}  {about}".rstrip() for key, about in keys)] if keys else []
    examples = yaml.safe_load((Path(__file__).parents[1] / "help" / "examples.yaml").read_text(encoding="utf-8"))
    if verb in examples:
        lines += ["", "examples:", *(f"  {example}" for example in examples[verb])]
    return "\n".join(lines) + ("\n" if lines else "")
