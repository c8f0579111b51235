"""The index of token files of other programs: what is known of them, in a prepared folder whose tokens lie elsewhere.

The borders of documents are as recorded, or found by the tokenizer's end of text. Tokens in rows are written out.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.sources.token_files import CUT, DAMAGED, MOST_IDS, TokenFile, TokenLayout
from lmtrain.data.store import bins, contents
from lmtrain.data.store.contents import Facts, version_of
from lmtrain.data.store.prepared import folder_key, folder_of, new_meta
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.shards import Extent, Shard
from lmtrain.data.store.writer import dtype_for
from lmtrain.errors import ReadError, UserError, first_line
from lmtrain.terminal import counted

INDEX_VERSION = 1  # to be raised when the same files and settings give another index
_CHUNK = 1 << 22  # tokens read at a time


@contextlib.contextmanager
def explained(where: Path) -> Iterator[None]:
    """Turns what a damaged file raises into a UserError."""
    try:
        yield
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"{where} can't be read: {first_line(error) or type(error).__name__}: {CUT}") from None


@dataclass
class TokenIndex:
    """Fills an empty folder with what is known of token files.

    tokenizer, named, lacking: the tokenizer, its name, and if there is none the reason.
    splits: the files of each split, with their layout, "train" first.
    """

    cfg: DataConfig
    path: Path
    tokenizer: PreTrainedTokenizerFast | None
    named: str
    lacking: str
    splits: dict[str, tuple[TokenLayout, list[Path]]]
    show: PrepareProgress
    largest: int = 0
    notes: list[str] = field(default_factory=list)
    versions: dict[Path, list[int]] = field(default_factory=dict)

    def key(self, tokenizer_cfg: TokenizerConfig) -> tuple[dict[str, Any], Path]:
        """Returns the key of the index, which has the place and content of all files, and its folder."""
        files = {split: [*some, *layout.also] for split, (layout, some) in self.splits.items()}
        with explained(self.path):
            self.versions = {file: version_of(file) for some in files.values() for file in some}
        digests = Facts(self.cfg.cache_dir).digests(list(self.versions), self.show.say)
        of = [[split, *([str(file.resolve()), digests[file]] for file in some)] for split, some in files.items()]
        made_with = tokenizers.tokenizer_hash(self.tokenizer) if self.tokenizer is not None else self.lacking
        key = folder_key(self.cfg, tokenizer_cfg, version=INDEX_VERSION, files=contents.fingerprint(of), made=made_with)
        return key, folder_of(self.cfg, f"{self.path.name}-index", key)

    def refuse_changed(self) -> None:
        for file, version in self.versions.items():
            if version_of(file) != version:
                raise ReadError(f"{file} was changed while it was read: start again once it is complete")

    def fill(self, folder: Path, key: dict[str, Any]) -> None:
        splits = dict[str, bins.SplitMeta]()
        for split, (layout, files) in self.splits.items():
            if split == "train" or layout is not self.splits["train"][0]:
                borders = _Borders(self.tokenizer if self.cfg.append_eos else None)
            splits[split] = self.write(folder, split, layout, files, borders)
            if split == "train":
                self.check_marks(borders)
                self.notes.append(self.described(layout, splits[split], borders))
        tokenizer = self.tokenizer
        if tokenizer is None:
            numbers = "samples will show token ids as numbers"
            self.show.say(f"{self.path} comes without a tokenizer ({self.lacking}): {numbers}")
            tokenizer = tokenizers.numbers(self.largest + 1)
        meta = new_meta(tokenizers.kept(tokenizer, folder), key)
        meta["splits"], meta["notes"] = splits, self.notes
        bins.save_meta(meta, folder)

    def write(
        self, folder: Path, split: str, layout: TokenLayout, files: list[Path], borders: "_Borders"
    ) -> bins.SplitMeta:
        """Writes the side files of one split; returns its counts, with the places of its tokens."""
        stem, done, last, documents = folder / f"{split}_00000.bin", 0, 0, 0
        parts, masks = list[Extent](), list[Path | None]()
        with stem.with_suffix(".docs").open("wb") as docs:
            for number, file in enumerate(files):
                with explained(file):
                    one = (
                        layout.read(file)
                        if layout.read
                        else self.written(layout, file, folder, f"{split}_{number:05d}")
                    )
                    self.check_name(one)
                    if one.part.tokens == 0:
                        continue
                    ends = borders.of(one, layout, done, self.check)
                if ends is not None and len(ends):
                    ends.astype("<u8").tofile(docs)
                    last, documents = int(ends[-1]), documents + len(ends)
                done += one.part.tokens
                parts.append(one.part)
                masks.append(one.mask)
            if done and borders.are_known and last != done:
                np.array([done], "<u8").tofile(docs)
                documents += 1
        if done == 0:
            raise UserError(f"{files[0]} is empty: there is nothing to train on")
        places = [_recorded(part, folder) for part in parts]
        entry: dict[str, Any] = {"file": stem.name, "tokens": done, "documents": None, "parts": places}
        if borders.are_known:
            entry |= {"documents": documents, "docs_sha256": _sha256(stem.with_suffix(".docs"))}
        else:
            stem.with_suffix(".docs").unlink()
        if any(masks):
            _write_mask(stem.with_suffix(".mask"), parts, masks)
            entry["mask_sha256"] = _sha256(stem.with_suffix(".mask"))
        for mask in folder.glob(f"{split}_*.learned"):
            mask.unlink()
        return {"tokens": done, "documents": entry["documents"], "bytes": None, "shards": [cast(bins.ShardMeta, entry)]}

    def check(self, ids: np.ndarray, file: Path) -> None:
        """Raises UserError if some of the ids, [n], are none of the tokenizer's."""
        least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
        self.largest = max(self.largest, most)
        if self.tokenizer is not None and most >= (size := tokenizers.vocab_size(self.tokenizer)):
            found = f"the bins in {self.path} hold token id {most}, but tokenizer {self.named} has only"
            raise UserError(f"{found} {size} ids: they were made with another one; set tokenizer=... to that one")
        if least < 0 or most >= MOST_IDS:
            raise UserError(f"{file} holds {least if least < 0 else most}, which is no token id: {CUT}")

    def written(self, layout: TokenLayout, file: Path, folder: Path, name: str) -> TokenFile:
        """Writes the tokens of a file of rows, and their loss mask beside it; the ends are those of the rows."""
        assert layout.rows is not None
        size = MOST_IDS if self.tokenizer is None else tokenizers.vocab_size(self.tokenizer)
        dtype = np.dtype(dtype_for(size)).newbyteorder("<")
        target, mask = folder / f"{name}.bin", folder / f"{name}.learned"
        lengths, masked = [np.empty(0, dtype=np.int64)], False
        with target.open("wb") as tokens, mask.open("wb") as learned:
            for rows in layout.rows(file):
                self.check(rows.ids, file)
                rows.ids.astype(dtype).tofile(tokens)
                lengths.append(rows.lengths)
                if rows.learned is not None:
                    rows.learned.astype(np.uint8).tofile(learned)
                    masked = True
        ends = np.cumsum(np.concatenate(lengths))
        part = Extent(target, dtype.str, 0, int(ends[-1]) if len(ends) else 0)
        return TokenFile(part, np.unique(ends[ends > 0]), mask if masked else None)

    def check_name(self, one: TokenFile) -> None:
        """Raises UserError if the file records the name of another tokenizer."""
        recorded = Path((one.tokenizer or "").removesuffix("/tokenizer.json")).name
        if not recorded or (self.path / "tokenizer").is_dir():
            return
        if self.tokenizer is None:
            self.lacking += f"; {one.part.path.name} was made with {recorded}" if recorded not in self.lacking else ""
        elif recorded.lower() != self.named.lower():
            found = f"{one.part.path} was made with tokenizer {one.tokenizer}, not {self.named}"
            raise UserError(f"{found}: set tokenizer=hub tokenizer.name_or_path={one.tokenizer}, or a folder named so")

    def check_marks(self, borders: "_Borders") -> None:
        """Raises UserError if the tokenizer's end of text never occurs in the training tokens."""
        if borders.mark is not None and borders.found == 0:
            token = self.tokenizer.eos_token if self.tokenizer is not None else ""
            found = f"{self.path} never holds {token}, the end of text of tokenizer {self.named}"
            advice = "set tokenizer=... to that one, or data.append_eos=false if they were written without"
            raise UserError(f"{found}: the tokens were made with another one: {advice}")

    def described(self, layout: TokenLayout, counts: bins.SplitMeta, borders: "_Borders") -> str:
        """Returns the note on what the files hold."""
        parts = counts["shards"][0]["parts"]
        dtypes = "/".join(sorted({np.dtype(dtype).name for _, dtype, _, _ in parts}))
        sure = "data.dtype says so" if self.cfg.dtype else "as their ids show"
        of = f"{dtypes} ({sure})" if layout.name == "nanoGPT" else dtypes
        mask = ", with a loss mask" if "mask_sha256" in counts["shards"][0] else ""
        files = counted(len(parts), "file")
        return f"{self.path} holds tokens of {layout.name} in {files}: {of}, {borders.described()}{mask}"


class _Borders:
    """Where documents end: as recorded, or found by the token that ends or begins them.

    mark: the token; None: it is not looked for.
    found: how often it occurs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None) -> None:
        self.tokenizer, self.found, self.are_known = tokenizer, 0, True
        self.mark = None if tokenizer is None else tokenizer.eos_token_id
        self._begins: bool | None = None
        self._blocks: bool | None = None
        self._recorded = False

    def of(
        self, one: TokenFile, layout: TokenLayout, done: int, check: Callable[[np.ndarray, Path], None]
    ) -> np.ndarray | None:
        """Returns the document ends in a file, counted from `done` on, the first token of the file, int64 [n].

        check: is called with all of the ids.
        """
        shard = Shard(one.part.path, one.part.dtype, one.part.tokens, {}, [one.part])
        if self._begins is None:
            self._begins = self._choose(shard, layout.begins)
        at = [np.empty(0, dtype=np.int64)]
        for start in range(0, shard.tokens, _CHUNK):
            ids = shard.read(start, min(_CHUNK, shard.tokens - start))
            check(ids, shard.path)
            if self.mark is not None:
                at.append(np.flatnonzero(ids == self.mark) + start)
        marks = np.concatenate(at)
        self.found += len(marks)
        ends = marks if self._begins else marks + 1
        if self._blocks is None:
            self._blocks = layout.rows is not None and one.mask is None and _are_blocks(one.ends, ends)
        if one.ends is not None and not self._blocks:
            self._recorded = True
            return one.ends + done
        self.are_known = self.mark is not None
        return ends[ends + done > 0] + done if self.are_known else None

    def _choose(self, shard: Shard, begins: bool | None) -> bool:
        """Chooses the token at the borders; returns whether it begins documents, by the first file if not known."""
        if self.mark is None or self.tokenizer is None:
            return False
        start, bos = shard.read(0, min(_CHUNK, shard.tokens)), self.tokenizer.bos_token_id
        if begins is None:
            begins = int(start[0]) in (self.mark, bos) and int(shard.read(shard.tokens - 1, 1)[0]) != self.mark
        if begins and bos is not None and not (start == self.mark).any():  # Llama's documents begin with BOS
            self.mark = bos
        return begins

    def described(self) -> str:
        if self._recorded:
            return "document ends as recorded"
        if not self.are_known or self.tokenizer is None:
            return "document ends unknown"
        where = "begin" if self._begins else "end"
        blocks = "rows are cut blocks, " if self._blocks else ""
        return f"{blocks}documents {where} with {self.tokenizer.convert_ids_to_tokens(self.mark)}"


def _are_blocks(rows: np.ndarray | None, documents: np.ndarray) -> bool:
    """Returns whether rows that end at `rows` are blocks of one length, cut without regard to `documents`."""
    if rows is None or len(rows) < 2:
        return False
    lengths = np.diff(rows, prepend=0)
    return bool((lengths[:-1] == lengths[0]).all() and lengths[-1] <= lengths[0] and not np.isin(documents, rows).all())


def _write_mask(file: Path, parts: list[Extent], masks: list[Path | None]) -> None:
    """Writes one loss mask of all files; those without one are learned."""
    with file.open("wb") as target:
        for part, mask in zip(parts, masks, strict=True):
            for start in range(0, part.tokens, _CHUNK):
                size = min(_CHUNK, part.tokens - start)
                values = np.ones(size, np.uint8) if mask is None else np.fromfile(mask, np.uint8, size, offset=start)
                if values.max(initial=0) > 1:
                    raise UserError(f"{mask} holds {values.max()}, and a loss mask 0 and 1: {CUT}")
                values.tofile(target)


def _recorded(part: Extent, folder: Path) -> list[Any]:
    path = part.path.name if part.path.parent == folder else str(part.path.resolve())
    return [path, part.dtype, part.offset, part.tokens]


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
