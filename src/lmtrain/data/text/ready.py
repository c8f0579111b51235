"""Opens tokens that are there already (data=bins): a folder that lmtrain prepared, or token files of other programs.

Of other programs' files an index is kept in data.cache_dir: a prepared folder like any other (see store/bins.py) whose
tokens stay where they are. It holds the ends of the documents, as recorded or else found by the end of text, the loss
mask and the tokenizer, and is found again by the content of the files.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.sources import addresses, token_files, token_rows
from lmtrain.data.sources.token_files import MOST_IDS, TokenLayout
from lmtrain.data.store import bins
from lmtrain.data.store.cache import build_once
from lmtrain.data.store.prepared import PreparedData, open_folder, prepare_folder
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.text.token_index import TokenIndex, explained
from lmtrain.errors import UserError
from lmtrain.files import shown_files
from lmtrain.terminal import counted

_TOKENS = (".bin", ".npy", ".ds", ".mds", ".parquet", ".arrow")
_LAYOUTS = [
    *token_files.LAYOUTS,
    (token_rows.is_mds, token_rows.mds),
    (lambda files: any(map(token_rows.is_columnar, files)), token_rows.columnar),
]


def open_ready(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, show: PrepareProgress) -> PreparedData:
    """Opens existing tokens.

    Raises:
        UserError: there are none, their files are incomplete or damaged, or they were made with another tokenizer than
            the requested one.
    """
    path = _local(cfg.path, "data.path", cfg, show)
    if bins.is_complete(path):
        if cfg.val_path or cfg.dtype:
            key = "val_path" if cfg.val_path else "dtype"
            raise UserError(f"{path} was prepared by lmtrain, with all that data.{key} could say: leave it out")
        return open_folder(*_own(path, tokenizer_cfg), [], cfg, show)
    tokenizer, named, lacking = _tokenizer(tokenizer_cfg, path)
    most_ids = tokenizers.vocab_size(tokenizer) if tokenizer is not None else MOST_IDS
    layout = _layout(path, cfg, most_ids)
    splits = {split: (layout, files) for split, files in layout.files.items()}
    if cfg.val_path:
        held_out = _layout(_local(cfg.val_path, "data.val_path", cfg, show), cfg, most_ids)
        splits["val"] = held_out, [file for files in held_out.files.values() for file in files]
    read = {file for layout, files in splits.values() for file in (*files, *layout.also)}
    unread = [file.name for file in _files(path) if file.suffix in _TOKENS and file not in read]
    index = TokenIndex(cfg, path, tokenizer, named, lacking, splits, show)
    notes = [f"{path}: not read: {', '.join(unread[:5])}, {counted(len(unread), 'file')} in all"] if unread else []
    index_key, target = index.key(tokenizer_cfg)
    return prepare_folder(target, lambda folder: index.fill(folder, index_key), index.refuse_changed, notes, cfg, show)


def _local(path: Any, key: str, cfg: DataConfig, show: PrepareProgress) -> Path:
    """Returns the folder or file at `path`, a copy in data.cache_dir of one at an address."""
    if not path or not isinstance(path, str):
        raise UserError(f"data=bins needs {key}=<folder>, one with tokens that lmtrain or another program wrote")
    if not addresses.is_address(path):
        local = Path(path).expanduser()
        if not local.exists():
            raise UserError(f"{key}={path}: no such folder; give the one that holds the tokens")
        return local
    _, files = addresses.find(path, key)
    identity = hashlib.sha256(json.dumps([file.identity() for file in files]).encode()).hexdigest()
    target = Path(cfg.cache_dir).expanduser() / f"remote-{identity[:16]}"
    if not target.is_dir():
        show.say(f"copying {len(files):,} files of {path} to {target}")
    build_once(target, Path.is_dir, lambda folder: addresses.download(files, folder), show.say)
    return target


def _own(folder: Path, tokenizer_cfg: TokenizerConfig) -> tuple[Path, bins.Meta, PreTrainedTokenizerFast]:
    """Opens bins that lmtrain prepared; returns the folder, its metadata and their tokenizer."""
    train = bins.open_bins(folder, "train")
    meta = bins.load_meta(folder)
    if any(shard.mask is not None for shard in train.shards) and "parts" not in meta["splits"]["train"]["shards"][0]:
        raise UserError(f"{folder} holds examples with a loss mask, and data=bins reads text: name bins of text")
    tokenizer = tokenizers.load_folder(folder / "tokenizer")
    own = tokenizers.tokenizer_hash(tokenizer)
    bins.check_tokenizer(meta["tokenizer_hash"], own, folder, f"{folder}/tokenizer")
    _check_asked(meta, tokenizer, tokenizer_cfg, folder)
    return folder, meta, tokenizer


def _check_asked(meta: bins.Meta, own: PreTrainedTokenizerFast, cfg: TokenizerConfig, folder: Path) -> None:
    """Checks that a tokenizer requested by name is the bins' own; one that is made from a corpus is not made again."""
    if cfg.kind in ("bpe", "char"):
        return
    named = tokenizers.identity(cfg)
    if cfg.kind == "hub" and named.unreachable and meta["key"].get("made_with") == named.settings:
        return
    asked = tokenizers.tokenizer_hash(tokenizers.load_or_train(cfg, lambda _: iter(()), named))
    bins.check_tokenizer(tokenizers.tokenizer_hash(own), asked, folder, f"tokenizer {named.label}")


def _tokenizer(cfg: TokenizerConfig, folder: Path) -> tuple[PreTrainedTokenizerFast | None, str, str]:
    """Returns the folder's tokenizer, or the requested one if it needs no corpus, its name, or why there is none."""
    if (folder / "tokenizer").is_dir():
        return tokenizers.load_folder(folder / "tokenizer"), f"{folder}/tokenizer", ""
    if cfg.kind not in ("hub", "bytes"):
        return None, cfg.kind, f"tokenizer.kind={cfg.kind} can't be made without the text"
    named = tokenizers.identity(cfg)
    try:
        return tokenizers.load_or_train(cfg, lambda _: iter(()), named), named.label, ""
    except UserError as error:
        if not named.unreachable:
            raise
        return None, named.label, str(error)


def _files(path: Path) -> list[Path]:
    """Returns the file, or those of the folder but hidden ones and its tokenizer's, sorted."""
    return [p for p in shown_files(path) if path / "tokenizer" not in p.parents]


def _layout(path: Path, cfg: DataConfig, most_ids: int) -> TokenLayout:
    """Recognises the layout of a folder, or of one file, by its content.

    Raises:
        UserError: no layout fits, or several do, or the files are incomplete.
    """
    files = _files(path)
    with explained(path):
        found = [make(files) for fits, make in _LAYOUTS if fits(files)]
        if len(found) > 1:
            names = " and ".join(layout.name for layout in found)
            raise UserError(f"{path} holds tokens of {names}: name the folder of one of them")
        if not found:
            raw = [file for file in files if file.suffix in (".bin", ".npy")]
            found = [token_files.plain(raw, cfg.dtype, most_ids)] if raw else []
    if not found:
        names = ", ".join(file.name for file in files[:10]) or "nothing"
        known = "lmtrain, nanoGPT, llm.c, datatrove, Megatron, litdata, dolma, MDS, Parquet or Arrow with input_ids"
        raise UserError(f"{path} holds no tokens in a known layout ({known}); it holds {names}")
    (layout,) = found
    if cfg.dtype and layout.name != "nanoGPT":
        raise UserError(f"data.dtype={cfg.dtype}: {layout.name}'s files say it themselves: leave it out")
    return layout
