"""Several sources of text for one run: each is prepared separately, all with the same tokenizer."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.mixing import Mixture, check_weights
from lmtrain.data.sources import choose as sources
from lmtrain.data.store import contents
from lmtrain.data.store.cache import build_once
from lmtrain.data.store.parts import Tasks
from lmtrain.data.store.prepared import PreparedData, folder_key, folder_of, settings
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.text.prepare import pieces_of, prepare
from lmtrain.errors import UserError

_CHANGES = 6  # maximum number of a source's shares over time that the plan shows
_MIXED = ("weight", "max_epochs")
_KEYS = ("path", "val_path", "name", "config_name", "revision", "source", "format", "train_split", "val_split",
         "val_fraction", "min_val_rows", "num_samples", "streaming", "text_column", "column_separator", "sample_by",
         "document_start", "min_length", "append_eos", "prepend_bos", "dtype", *_MIXED)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TextSource:
    """One source of a mixture: its config, its weights by the step from which each holds, its maximum epochs."""

    cfg: DataConfig
    label: str
    weights: dict[int, float]
    max_epochs: float | None


PreparedSources = list[tuple[TextSource, PreparedData]]


def text_sources(cfg: DataConfig) -> list[TextSource]:
    """Returns the sources of data.mixture, without opening them.

    Raises:
        UserError: there are none; an entry has an unknown key, a wrong weight, or not exactly one place to read from;
            the weights are all 0 from some step on.
    """
    if not cfg.mixture:
        raise UserError("data.mixture is empty: list sources, data.mixture=[{path: a.txt, weight: 3}, {name: b}]")
    found: list[TextSource] = []
    for number, entry in enumerate(cfg.mixture):
        where = f"data.mixture[{number}]"
        part = _config(cfg, entry, where)
        label = Path(str(part.path or part.name or part.source)).name
        same = sum(s.label.split("#")[0] == label for s in found)
        label = f"{label}#{same + 1}" if same else label
        found.append(TextSource(part, label, _weights(entry, where), _max_epochs(entry, where)))
    check_weights([source.weights for source in found])
    return found


def _config(cfg: DataConfig, entry: dict[str, Any], where: str) -> DataConfig:
    """Returns the config of one source: that of the mixture, overridden by the keys of the entry."""
    sources.check_keys(entry, _KEYS, where)
    own = {key: value for key, value in entry.items() if key not in _MIXED}
    if ("path" in own) + ("name" in own) + (own.get("source") == "python_stdlib") != 1:
        raise UserError(f"{where}: give one of path (files), name (a dataset of the hub) or source: python_stdlib")
    if own.get("source") not in (None, "python_stdlib", "bins", "files", "hub"):
        raise UserError(f"{where}.source={own['source']}: files, hub, bins or python_stdlib")
    place = {"source": "files" if "path" in own else "hub", "mixture": None, "mixture_temperature": None}
    if "val_fraction" in own:  # as if it were set on the command line
        own = {"min_val_rows": 0, **own}
    return dataclasses.replace(cfg, **{**place, **own})


def _weights(entry: dict[str, Any], where: str) -> dict[int, float]:
    """Returns the weights by the step from which each holds; a plain number holds from step 0."""
    given = entry.get("weight", 1.0)
    weights = given if isinstance(given, dict) else {0: given}
    for step, weight in weights.items():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            example = "a weight that changes is written as {step: weight}, such as {0: 1.0, 8000: 0.2}"
            raise UserError(f"{where}.weight={given}: {step!r} is not a step; {example}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise UserError(f"{where}.weight={given}: a weight is a number from 0 up")
    if 0 not in weights:
        raise UserError(f"{where}.weight={given}: say what it is at step 0, {{0: 0, {min(weights, default=1)}: ...}}")
    return {int(step): float(weight) for step, weight in weights.items()}


def _max_epochs(entry: dict[str, Any], where: str) -> float | None:
    most = entry.get("max_epochs")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int | float) or not 0 < most < math.inf):
        raise UserError(f"{where}.max_epochs={most}: a number above 0, how often its rows are seen at most")
    return most


def prepare_mixture(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, tasks: Tasks | None = None) -> PreparedSources:
    """Prepares each source in a folder of its own, which is reused by other mixtures and by runs on that source alone.

    tasks: what tokenizes each source in shares, see `prepare`.

    Raises:
        UserError: see `prepare`; also if sources are bins of different tokenizers.
    """
    found = text_sources(cfg)
    tokenizer_cfg = _shared_tokenizer(cfg, tokenizer_cfg, found)
    parts = [(source, prepare(source.cfg, tokenizer_cfg, tasks=tasks)) for source in found]
    for source, part in parts:
        if part.meta["tokenizer_hash"] != parts[0][1].meta["tokenizer_hash"]:
            raise UserError(f"data.mixture: {source.label} has another tokenizer than {found[0].label}: use one")
    return parts


def mixture_fingerprint(parts: PreparedSources) -> str:
    """Returns a hash of the tokens of all sources and of how they are mixed."""
    mixed = [[sorted(source.weights.items()), source.max_epochs] for source, _ in parts]
    return contents.fingerprint([*(part.fingerprint for _, part in parts), mixed])


def _shared_tokenizer(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, found: list[TextSource]) -> TokenizerConfig:
    """Returns the tokenizer config for all sources; one that is made from text is built once, from all in turn."""
    if tokenizer_cfg.kind not in ("bpe", "char"):
        return tokenizer_cfg
    opened = [(sources.open_source(s.cfg), s.cfg) for s in found if s.cfg.source != "bins"]
    if not opened:
        return tokenizer_cfg
    # Its folder follows from all of the sources.
    named = tokenizers.identity(tokenizer_cfg)
    key = folder_key(
        cfg,
        tokenizer_cfg,
        tokenizer_of=[[s.settings, s.resolved, settings(c) | sources.min_val_rows(c)] for s, c in opened],
    )
    target = folder_of(cfg, f"mixture-{named.label}", key)

    def texts(name: str) -> Iterator[str]:
        streams = [sources.pieces(source, part, name) or iter(()) for source, part in opened]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*streams))
        return (piece.text for piece in in_turn if piece is not None)

    def build(folder: Path) -> None:
        tokenizers.save(tokenizers.load_or_train(tokenizer_cfg, texts, named), folder)
        for source, _ in opened:
            sources.refuse_changed(source)

    # It is made once; runs then read it as they read any other.
    with PrepareProgress(show=True) as show:
        if not (target / "tokenizer.json").exists():
            show.say(f"making the tokenizer of {len(opened)} sources: {', '.join(s.label for s, _ in opened)}")
        build_once(target, lambda folder: (folder / "tokenizer.json").exists(), build, show.say)
    of_text: dict[str, Any] = dict.fromkeys(("vocab_size", "min_frequency", "train_characters", "add_tokens"))
    return dataclasses.replace(tokenizer_cfg, kind="hub", name_or_path=str(target), **of_text)


def mixture_lines(parts: PreparedSources, mixture: Mixture) -> list[str]:
    """Returns one line per source: its share and the changes of it, its number of rows, its folder."""
    lines = []
    for s, (source, part) in enumerate(parts):
        shares = [(mixture.step_sizes.step_of(stretch.start), stretch.shares[s]) for stretch in mixture.stretches]
        changed = [(at, share) for (_, before), (at, share) in itertools.pairwise(shares) if share != before]
        words = [f"{shares[0][1]:.4g} of the rows", *(f"{share:.4g} from step {at:,} on" for at, share in changed)]
        shown = ", ".join(words[:_CHANGES] + (["..."] if len(words) > _CHANGES else []))
        lines.append(f"  {source.label}: {shown}; it has {mixture.sources[s].rows:,} ({part.folder})")
    return lines


def documents_of(cfg: DataConfig, name: str) -> Iterator[Any]:
    """Yields the documents of a split of all sources, one source after the other."""
    for source in text_sources(cfg):
        if source.cfg.source == "bins":
            raise UserError(f"{source.label} of data.mixture is token bins: evaluate text, data=text data.val_path=...")
        yield from pieces_of(source.cfg, name) or ()
