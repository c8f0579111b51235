"""A folder of prepared tokens, of text or of examples: filled once, found again by its key, opened and verified.

The key is computed from every setting that shapes the tokens.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.config.constraints import PREPARED
from lmtrain.config.fingerprint import short_hash
from lmtrain.config.keys import values
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.store import bins, contents
from lmtrain.data.store.cache import build_once
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.writer import dtype_for
from lmtrain.errors import RunError, disk_full
from lmtrain.secrets import hashed, shown_in

_LONGEST_LABEL = 200  # a file name may have 255 bytes, and the names of locks and temporary folders are longer


@dataclass(frozen=True)
class PreparedData:
    """A folder of bins and its tokenizer; `fingerprint` identifies the tokens, independent of the folder's location.

    splits: the token bins of each split, by name.
    notes: remarks on the source, such as files that are not read, one line each.
    """

    folder: Path
    meta: bins.Meta
    splits: dict[str, bins.SplitBins]
    tokenizer: PreTrainedTokenizerFast
    fingerprint: str
    notes: list[str]


def settings(section: DataConfig | TokenizerConfig) -> dict[str, Any]:
    """Returns the config keys that shape tokens, except those that name files, whose contents are in the key instead.

    Unset values are left out, so that a key that is added to the schema does not lead to new folders.
    """
    return {k: v for k, v in values(section, PREPARED, by_content=False).items() if v not in (None, [], {})}


def folder_key(data: DataConfig, tokenizer: TokenizerConfig, **contents: Any) -> dict[str, Any]:
    """Returns the key of a prepared folder, in the form in which it is read back from JSON.

    Args:
        contents: identities of the files, datasets and templates that the config names; a version.
    """
    # Secrets in the settings of a user's own source are replaced by hashes, as the key is written beside the tokens.
    key = shown_in({"data": settings(data), "tokenizer": settings(tokenizer), **contents}, hashed)
    if data.prepend_bos == "auto" and tokenizer.kind == "hub":  # those made here put none
        key["prepend_bos"] = "own"
    elif data.prepend_bos is True:
        key["prepend_bos"] = True
    return dict(json.loads(json.dumps(key, sort_keys=True)))


def folder_of(cfg: DataConfig, label: str, key: dict[str, Any]) -> Path:
    """Returns the folder for a key, <cache_dir>/<label>-<hash>."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", label)
    return Path(cfg.cache_dir).expanduser() / f"{name[:_LONGEST_LABEL]}-{short_hash(key)[:12]}"


def find_folder(cfg: DataConfig, label: str, key: dict[str, Any], show: PrepareProgress) -> Path:
    """Returns `folder_of` a key, or the newest complete one that differs only in what a silent hub couldn't tell."""
    target = folder_of(cfg, label, key)
    unknown = [name for name, value in key["resolved"].items() if value is None]
    if not unknown or bins.is_complete(target):
        return target
    found = []
    for folder in target.parent.glob(f"{target.name.rpartition('-')[0]}-*"):
        if ".tmp-" in folder.name or not bins.is_complete(folder):
            continue
        theirs = bins.load_meta(folder)["key"]
        if {**theirs, "resolved": {**theirs.get("resolved", {}), **dict.fromkeys(unknown)}} == key:
            found.append(folder)
    newest = max(found, key=lambda f: (f / bins.META).stat().st_mtime_ns, default=None)
    if newest is not None:
        show.say(f"the hub doesn't answer; using what was prepared from it before: {newest}")
    return newest or target


def prepare_folder(
    target: Path,
    fill: Callable[[Path], object],
    refuse_changed: Callable[[], object],
    notes: list[str],
    cfg: DataConfig,
    show: PrepareProgress,
) -> PreparedData:
    """Opens the folder `target`, first filling it by fill(empty folder), which writes meta.json last, if incomplete.

    It is safe to call from several processes at once (one fills, the others wait) and to kill at any moment (nothing
    that looks complete is left, and the next call starts over).

    Args:
        refuse_changed: called before the folder is published; raises ReadError if what its key identifies was written
            while it was read.

    Raises:
        UserError: a file is missing, was truncated or changed after it was prepared; the cache can't be written.
        RunError: the disk is full.
    """

    def fill_or_explain(folder: Path) -> None:
        try:
            fill(folder)
            refuse_changed()
        except Exception as error:
            if disk_full(error):
                raise RunError(_explain_full(folder, show)) from None
            raise

    if not bins.is_complete(target):
        build_once(target, bins.is_complete, fill_or_explain, show.say)
        written = bins.recorded_hashes(bins.load_meta(target))
        contents.remember(target, {name: digest for name, digest in written.items() if digest}, cfg.cache_dir)
    tokenizer = tokenizers.load_folder(target / "tokenizer")  # also if it was just saved there: it knows its files
    return open_folder(target, bins.load_meta(target), tokenizer, notes, cfg, show)


def open_folder(
    folder: Path,
    meta: bins.Meta,
    tokenizer: PreTrainedTokenizerFast,
    notes: list[str],
    cfg: DataConfig,
    show: PrepareProgress,
) -> PreparedData:
    """Opens a prepared folder; raises UserError if a file is missing, was truncated or changed since."""
    splits = {name: bins.open_bins(folder, name) for name in meta["splits"]}
    hashes = contents.check(folder, bins.recorded_hashes(meta), cfg.cache_dir, show.say)
    for split in splits.values():
        for shard in split.shards:
            shard.refuse_changed()
    notes = [*notes, *meta.get("notes", [])]
    return PreparedData(folder, meta, splits, tokenizer, bins.fingerprint(meta, hashes), notes)


def new_meta(tokenizer: PreTrainedTokenizerFast, key: dict[str, Any]) -> bins.Meta:
    """Returns the metadata of a folder that has no splits yet."""
    size = tokenizers.vocab_size(tokenizer)
    return {
        "format_version": bins.FORMAT_VERSION,
        "dtype": dtype_for(size),
        "vocab_size": size,
        "tokenizer_hash": tokenizers.tokenizer_hash(tokenizer),
        "eos_id": tokenizer.eos_token_id,
        "splits": {},
        "key": key,
    }


def _explain_full(folder: Path, show: PrepareProgress) -> str:
    written = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    need = f"more than the {written / 1e6:,.1f} MB written so far"
    if show.total and show.text_bytes:
        need = f"about {written * max(1.0, show.total / show.text_bytes) / 1e6:,.1f} MB"
    free = shutil.disk_usage(folder).free
    found = f"the disk is full: preparing needs {need} in {folder.parent}, where {free / 1e6:,.1f} MB are left"
    return f"{found}. Free some space, or set data.cache_dir to another disk; what was written is removed"
