"""A hook of mkdocs: the defaults of conf/ and their comments become the page keys.md, with every key."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.structure.files import File, Files

from lmtrain.config.config_files import ConfigFile, origins
from lmtrain.config.override_text import leaves_of

_BASES = ("common", "base", "default")  # read before the options that are based on them
_NO_KEYS = ("experiment", "pipeline", "debug", "hydra")  # groups of values for keys of other groups
_HEAD = """# Every key

```bash
python -m lmtrain.train --cfg                 # every key of a run, with its value
python -m lmtrain.explain data.seq_len        # where a value comes from, and what a change affects
```

The defaults of `conf/` and their comments. A key of single options names these; where an option of the group has
another default, `--cfg` shows it.
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the page, which is in no folder."""
    files.append(File.generated(config, "keys.md", content=page(Path(config["docs_dir"]).parent / "conf")))
    return files


def page(conf: Path) -> str:
    """Returns all keys as Markdown, a table for each group."""
    groups = sorted(folder for folder in conf.iterdir() if folder.is_dir() and folder.name not in _NO_KEYS)
    return _HEAD + "".join(f"\n## {group.name}\n\n{_table(group)}" for group in groups)


def _table(group: Path) -> str:
    rows = [f"| `{key}` | `{default}` | {about} |" for key, default, about in _rows(group)]
    return "\n".join(["| key | default | |", "| --- | --- | --- |", *rows]) + "\n"


def _rows(group: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (key, default, comment): one row for a key of all options, else one for each comment, with its options."""
    files = sorted(group.glob("*.yaml"), key=lambda file: (file.stem not in _BASES, file.stem))
    found: dict[str, dict[str, list[tuple[str, str]]]] = {}  # of a key and a comment on it: options and defaults
    for file in files:
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        own = {name: value for name, value in tree.items() if name not in ("defaults", "name", "_target_")}
        for key, _ in leaves_of({group.name: own}):
            for origin in origins(key, [ConfigFile(file, group.name)], []):
                places = found.setdefault(key, {}).setdefault(origin.comment, [])
                places.append((file.stem, " ".join(origin.text.split())))
    for key, comments in found.items():
        told = {about: places for about, places in comments.items() if about} or comments
        for about, places in told.items():
            options = ", ".join(option for option, _ in places)
            of_all = len(files) == 1 or places[0][0] in _BASES
            yield key, places[0][1], ("" if of_all else f"{group.name}= {options}: ") + _plain(about)
            if of_all:
                break


def _plain(text: str) -> str:
    """Returns a comment as Markdown for a cell of a table: nothing in it but `code` has a meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p[:1] == "`" else re.sub(r"[][*_<>|\\{}]", lambda m: f"&#{ord(m[0])};", p) for p in parts)
