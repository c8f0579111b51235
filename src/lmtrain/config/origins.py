"""Where the value of a key comes from: which file of the configs, which line, or the command line. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from lmtrain.config.effect import typed_keys
from lmtrain.config.parts import Part


@dataclass(frozen=True)
class Origin:
    """One place that sets a key."""

    where: str  # a file, or the command line
    line: int | None
    text: str  # the value as it is written there
    comment: str  # what the file says about the key

    def __str__(self) -> str:
        return self.where if self.line is None else f"{self.where}, line {self.line}"


def origins(key: str, composed: Sequence[Part], overrides: Sequence[str]) -> list[Origin]:
    """All places that set `key`, the one that wins last."""
    found = [o for part in composed for o in _in_file(key, part)]
    if key in typed_keys(overrides):
        found.append(Origin("the command line", None, typed_keys(overrides)[key], ""))
    return found


def _in_file(key: str, part: Part) -> Iterator[Origin]:
    if part.package and not key.startswith(f"{part.package}."):
        return
    names = key.removeprefix(f"{part.package}.").split(".") if part.package else key.split(".")
    text = part.path.read_text(encoding="utf-8")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 0
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next((p for p in pairs if p[0].value == name), None)
        if pair is None:
            return
        line, node = pair[0].start_mark.line, pair[1]
    if isinstance(node, yaml.MappingNode) and node.value:
        return  # a section
    written = text[node.start_mark.index : node.end_mark.index]
    yield Origin(str(part.path), line + 1, written, _comment(text.splitlines(), line))


def _comment(lines: list[str], line: int) -> str:
    """What stands behind the value, or above it."""
    _, sign, behind = lines[line].partition(" # ")
    if sign:
        return behind.strip()
    above: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("# ") and "=" not in lines[line - 1].split()[1]:
        line -= 1
        above.insert(0, lines[line].strip().lstrip("# "))
    return " ".join(above)
