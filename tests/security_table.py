"""The table of docs/security.md, made of the schema. `python tests/security_table.py` writes it into the page."""

from pathlib import Path

from lmtrain.config.constraints import OPEN
from lmtrain.config.keys import Key, keys_of
from lmtrain.config.sections import all_keys
from lmtrain.objectives.distill import DistillOptions
from lmtrain.objectives.grpo_options import GRPOOptions
from lmtrain.objectives.kto import KTOOptions
from lmtrain.objectives.mdlm import MDLMOptions
from lmtrain.objectives.reward import RewardOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- made of the schema by `python tests/security_table.py` -->\n", "<!-- end -->\n"


def keys() -> list[Key]:
    """Returns all keys, with those that objectives declare in their `Options`."""
    found = {key.name: key for key in all_keys()}
    for options in (DistillOptions, GRPOOptions, KTOOptions, MDLMOptions, RewardOptions):
        found |= {key.name: key for key in keys_of(options, "objective.") if key.name not in found}
    return list(found.values())


def table() -> str:
    """Returns a row for each set of values that is not `anything`, with the keys that somebody else may set to it."""
    rows: dict[str, list[str]] = {}
    for key in keys():
        if key.open is not OPEN:
            rows.setdefault(key.open.to, []).append(f"`{key.name}`")
    lines = [f"| {', '.join(sorted(names))} | {to} |" for to, names in sorted(rows.items(), key=lambda row: row[1])]
    return "\n".join(["| key | somebody else's file may set it to |", "| --- | --- |", *lines, ""])


def page() -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
