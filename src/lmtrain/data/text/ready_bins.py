"""Bins that are there already (data=bins): a folder that lmtrain prepared, or nanoGPT's train.bin and val.bin."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.cache import Facts
from lmtrain.data.sources.addresses import is_address
from lmtrain.data.text import bins
from lmtrain.data.tokenizers import Identity
from lmtrain.errors import UserError


def open_ready(
    cfg: DataConfig, tokenizer_cfg: TokenizerConfig, say: Callable[[str], None]
) -> tuple[Path, bins.Meta, PreTrainedTokenizerFast]:
    """The folder, its sidecar (made up where there is none) and the tokenizer of its tokens.

    Raises:
        UserError: no bins there, made with another tokenizer than the one asked for, or ids it doesn't have.
    """
    if not cfg.path or not isinstance(cfg.path, str):
        raise UserError("data=bins needs data.path=<folder>: one that lmtrain prepared, or with train.bin and val.bin")
    if is_address(cfg.path):
        raise UserError(f"data.path={cfg.path}: bins are read from a disk: copy the folder to one and name it there")
    folder = Path(cfg.path).expanduser()
    train = bins.open_bins(folder, "train")
    if train.meta is not None:
        if any(shard.mask is not None for shard in train.shards):
            raise UserError(f"{folder} holds examples with a loss mask, and data=bins reads text: name bins of text")
        tokenizer = tokenizers.load_folder(folder / "tokenizer")
        known = (tokenizers.tokenizer_hash(tokenizer), tokenizers.plain_text_hash(tokenizer))
        bins.check_tokenizer(train.meta["tokenizer_hash"], known, folder, f"{folder}/tokenizer")
        _check_asked(train.meta, tokenizer, tokenizer_cfg, folder)
        return folder, train.meta, tokenizer
    return _open_plain(cfg, tokenizer_cfg, folder, train, say)


def _check_asked(meta: bins.Meta, own: PreTrainedTokenizerFast, cfg: TokenizerConfig, folder: Path) -> None:
    """A tokenizer asked for by name must be the bins' own; one that would be made from a corpus is not made again."""
    if cfg.kind in ("bpe", "char"):
        return
    named = tokenizers.identity(cfg)
    made_with = meta["key"].get("made_with", meta["key"].get("tokenizer"))  # the second in folders made earlier
    if cfg.kind == "hub" and named.unreachable and made_with == named.settings:
        return
    asked = tokenizers.tokenizer_hash(tokenizers.load_or_train(cfg, lambda _: iter(()), named))
    bins.check_tokenizer(tokenizers.tokenizer_hash(own), (asked,), folder, f"tokenizer {named.label}")


def _open_plain(
    cfg: DataConfig, tokenizer_cfg: TokenizerConfig, folder: Path, train: bins.SplitBins, say: Callable[[str], None]
) -> tuple[Path, bins.Meta, PreTrainedTokenizerFast]:
    """nanoGPT's layout. Its meta.pkl is never read: a pickle can run any code."""
    splits = {"train": train}
    if bins.has_split(folder, "val"):
        splits["val"] = bins.open_bins(folder, "val")
    facts = Facts(cfg.cache_dir)
    largest = max(
        facts.of(s.shards[0].path, "largest_token", lambda s=s: bins.largest_token(s))  # type: ignore[misc]
        for s in splits.values()
    )
    tokenizer = _plain_tokenizer(tokenizer_cfg, folder, largest, say)
    meta: bins.Meta = {
        "format_version": bins.FORMAT_VERSION,
        "dtype": train.dtype,
        "vocab_size": tokenizers.vocab_size(tokenizer),
        "tokenizer_hash": tokenizers.tokenizer_hash(tokenizer),
        "eos_id": tokenizer.eos_token_id,
        "splits": {
            name: {
                "tokens": s.tokens,
                "documents": None,
                "bytes": None,
                "shards": [{"file": s.shards[0].path.name, "tokens": s.tokens, "documents": 0}],
            }
            for name, s in splits.items()
        },
        "key": {},
    }
    return folder, meta, tokenizer


def _plain_tokenizer(
    cfg: TokenizerConfig, folder: Path, largest: int, say: Callable[[str], None]
) -> PreTrainedTokenizerFast:
    """The tokenizer asked for, where it can be had without a corpus; else one that writes ids as numbers."""
    reason = f"tokenizer.kind={cfg.kind} can't be made without the text"
    tokenizer: PreTrainedTokenizerFast | None = None
    if (folder / "tokenizer").is_dir():
        tokenizer, name = tokenizers.load_folder(folder / "tokenizer"), f"{folder}/tokenizer"
    elif cfg.kind in ("hub", "bytes"):
        named: Identity = tokenizers.identity(cfg)
        name = named.label
        try:
            tokenizer = tokenizers.load_or_train(cfg, lambda _: iter(()), named)
        except UserError as error:
            if not named.unreachable:
                raise
            reason = str(error)
    if tokenizer is None:
        say(f"{folder} comes without a tokenizer ({reason}): samples will show token ids as numbers")
        return tokenizers.numbers(largest + 1)
    if largest >= tokenizers.vocab_size(tokenizer):
        raise UserError(
            f"the bins in {folder} hold token id {largest}, but tokenizer {name} has only "
            f"{tokenizers.vocab_size(tokenizer)} ids: they were made with another one; set tokenizer=... to that one"
        )
    return tokenizer
