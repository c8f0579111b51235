"""Tokenizers from the hub or a folder, or made here (a BPE trained on the corpus, raw bytes, characters).

Those made here are fast tokenizers with `<|endoftext|>` as beginning-of-text and end-of-text token and no padding
token, so a saved one loads with AutoTokenizer. The same corpus gives the same tokenizer file, byte for byte. A run's
copy is verified by the hash of each file (`file_hashes`) and of what decides its token ids (`gives_ids_of`).
"""

import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import errors as hub_errors
from huggingface_hub import hf_hub_download
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import bpe_training as training
from lmtrain.data import framing, hub
from lmtrain.errors import ReadError, UserError, first_line
from lmtrain.files import open_regular, read_regular

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"  # for character tokenizers only: a prompt may hold a character that the corpus lacks
# The files of a folder that make up its identity.
_FILES = ("tokenizer*", "*.model", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*",
          "additional_chat_templates/*", "processor_config.json")  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """The identity of a tokenizer before it is loaded: its settings, what the name resolved to, and a display label.

    `resolved` is a commit hash or a digest; it is empty for tokenizers made here, and None if the hub didn't answer
    (`unreachable` gives the reason).
    """

    settings: dict[str, Any]
    resolved: str | None
    label: str
    unreachable: str = ""


def identity(cfg: TokenizerConfig) -> Identity:
    """Returns the identity of the tokenizer that `cfg` names; raises UserError if a folder or name doesn't exist."""
    if cfg.kind == "bpe":
        shaping = ("kind", "vocab_size", "min_frequency", "train_characters")
        return Identity({key: getattr(cfg, key) for key in shaping}, "", f"bpe{cfg.vocab_size}")
    if cfg.kind != "hub":
        return Identity({"kind": cfg.kind}, "", cfg.kind)
    if not cfg.name_or_path:
        raise UserError("tokenizer.name_or_path is not set: a name on the hub (gpt2) or a folder with tokenizer.json")
    name = cfg.name_or_path
    folder = Path(name).expanduser()
    settings: dict[str, Any] = {"kind": "hub"}
    if cfg.add_tokens:
        settings["add_tokens"] = cfg.add_tokens
    if folder.is_dir():
        found = sorted({p for pattern in _FILES for p in folder.glob(pattern) if p.is_file()})
        if not found:
            raise UserError(f"tokenizer.name_or_path={name}: the folder holds no tokenizer.json or vocabulary")
        return Identity(settings, _digest(found), folder.resolve().name)
    if name.startswith(("/", "./", "../", "~")):
        raise UserError(f"tokenizer.name_or_path={name}: no such folder")
    settings |= {"name_or_path": name, "revision": cfg.revision}
    commit, unreachable = hub.commit_of("tokenizer", name, cfg.revision)
    return Identity(settings, commit, name.split("/")[-1], unreachable)


def refuse_changed(cfg: TokenizerConfig, named: Identity) -> None:
    """Raises ReadError if the files of a tokenizer in a folder were changed since they were identified."""
    is_folder = cfg.kind == "hub" and Path(cfg.name_or_path or "").expanduser().is_dir()
    if is_folder and identity(cfg).resolved != named.resolved:
        raise ReadError(f"tokenizer.name_or_path={cfg.name_or_path} was changed while it was read: start again")


def _digest(paths: list[Path]) -> str:
    """Returns the SHA-256 over the files' contents, in order; their names don't matter."""
    try:
        return hashlib.sha256("".join(_sha256(path) for path in paths).encode()).hexdigest()
    except OSError as error:
        raise UserError(f"{error.filename} can't be read: {error.strerror}") from None


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.sha256(file.read()).hexdigest()


def load_or_train(
    cfg: TokenizerConfig,
    texts: Callable[[str], Iterator[str]],
    named: Identity | None = None,
    watch: Callable[[Iterator[str]], Iterator[str]] = iter,
) -> PreTrainedTokenizerFast:
    """Loads or trains the tokenizer that `cfg` names.

    Args:
        cfg: the tokenizer's config.
        texts: returns the text of split "train" or "val", in pieces of any length; called only if the text is needed.
        named: `identity(cfg)`, if it is already known.
        watch: wraps the iterator of text that a BPE is trained on, for a progress bar.

    Raises:
        UserError: a name can't be fetched, a tokenizer has no fast version, or the vocabulary is too small.
    """
    if cfg.kind == "bpe":
        tokenizer = _wrap(_train_bpe(cfg, watch(_at_most(texts("train"), cfg.train_characters))))
    elif cfg.kind == "bytes":
        tokenizer = _wrap(_bytes())
    elif cfg.kind == "char":
        tokenizer = _wrap(_characters(texts), unk_token=UNKNOWN)
    else:
        tokenizer = _load(cfg, named or identity(cfg))
    if cfg.add_tokens:
        tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in cfg.add_tokens])
    return tokenizer


def load_folder(folder: Path) -> PreTrainedTokenizerFast:
    """Loads a tokenizer that `save` wrote; raises UserError if the files can't be read as a tokenizer."""
    return read(folder, PreTrainedTokenizerFast)


def read(folder: Path, cls: Any) -> Any:
    """Loads the tokenizer of a folder with a class of transformers.

    Raises:
        UserError: the files are not a tokenizer, or not one that can be used for text.
    """
    try:
        return usable(cls.from_pretrained(str(folder)))
    except Exception as error:  # from JSON, transformers or tokenizers, which raises Exception itself
        raise UserError(f"{folder} can't be read as a tokenizer: {first_line(error)}") from None


def usable(tokenizer: Any) -> Any:
    """Returns the tokenizer itself; raises ValueError if its tokenizer_config.json made it unusable for text."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer_class {type(tokenizer).__name__} is not a text tokenizer for a language model")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ValueError(f"model_max_length is {tokenizer.model_max_length!r} instead of a number")
    return tokenizer


def completed(tokenizer: Any, name_or_path: str, **options: Any) -> Any:
    """Gives a tokenizer what transformers leaves in the files beside it.

    These are the chat template of a multimodal model's processor, and BOS before texts (see framing.py).
    """
    kept = {key: value for key, value in options.items() if key in ("revision", "local_files_only")}
    for name in ("chat_template.json", "processor_config.json") if tokenizer.chat_template is None else ():
        file = hub.optional_file(name_or_path, name, **kept)
        found = json.loads(read_regular(file)).get("chat_template") if file is not None else None
        if isinstance(found, str):
            tokenizer.chat_template = found
            break
    return framing.follow_file(tokenizer, name_or_path, **kept)


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Calls save_pretrained, with a class name that all versions of transformers know; adds tokenizer.model if any."""
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5 calls the class TokenizersBackend, which version 4 and programs built on it cannot load.
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    # Version 4 fails on a list under this name of version 5, which still reads the earlier one.
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    for key in ("is_local", "local_files_only"):  # where a tokenizer was loaded from is not one of its properties
        config.pop(key, None)
    if _keep_sentencepiece(tokenizer, folder):
        added = tokenizer.added_tokens_decoder.items()
        config["added_tokens_decoder"] = {str(i): token.__getstate__() for i, token in added}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def kept(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    """Saves a tokenizer in `folder`/tokenizer and loads it from there, as later runs will."""
    save(tokenizer, folder / "tokenizer")
    return load_folder(folder / "tokenizer")


def _keep_sentencepiece(tokenizer: PreTrainedTokenizerFast, folder: Path) -> bool:
    """Copies the sentencepiece model that the tokenizer came with, if any: llama.cpp's converter needs it.

    That file lacks the added tokens; the converter takes them from tokenizer_config.json.
    """
    source = Path(getattr(tokenizer, "vocab_file", None) or "")
    if source.suffix != ".model" or not source.is_file():
        return False
    if source.resolve() != (folder / source.name).resolve():
        shutil.copyfile(source, folder / source.name)
    return True


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the ids of the tokens that read `text`; several if it begins a word in one of them.

    Alone, SentencePiece's tokenizers write a text as the beginning of a word: "." as "▁.", or as "▁" and ".".
    """
    alone, after, whole = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, "x", f"x{text}"))
    behind = whole[len(after) :] if whole[: len(after)] == after else []
    single = {ids[0] for ids in (alone, behind) if len(ids) == 1} | {tokenizer.get_vocab().get(text)} - {None}
    return sorted(i for i in single if tokenizer.decode([i], clean_up_tokenization_spaces=False) == text)


def unknown_token(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Returns the id that stands for characters which the tokenizer lacks; None if it lacks none.

    Some tokenizers that lack none, such as GPT-2's, name the end of text as their unknown token.
    """
    unknown: int | None = tokenizer.unk_token_id
    return None if unknown == tokenizer.eos_token_id else unknown


def plain_backend(tokenizer: PreTrainedTokenizerFast, also: Collection[str] = ()) -> Backend:
    """Returns a copy of the tokenizer's backend that reads special tokens as text, without truncation and padding.

    also: added tokens that it reads as text too, though they are not flagged as special.
    """
    if also:
        plain = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in plain["added_tokens"]:
            token["special"] = token["special"] or token["content"] in also
        backend = Backend.from_str(json.dumps(plain))
    else:
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the SHA-256 of what decides token ids: normalizer, pre-tokenizer, model, post-processor, added tokens.

    The flags of added tokens count too. Truncation, padding, chat templates and decoding are left out: they may change
    without affecting the ids.
    """
    return ids_hash(json.loads(tokenizer.backend_tokenizer.to_str()))


def ids_hash(plain: dict[str, Any]) -> str:
    matters = {k: plain.get(k) for k in ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")}
    return hashlib.sha256(json.dumps(matters, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns one more than the largest token id of the tokenizer."""
    return max(tokenizer.get_vocab().values()) + 1


def _load(cfg: TokenizerConfig, named: Identity) -> PreTrainedTokenizerFast:
    name = str(cfg.name_or_path)
    folder = Path(name).expanduser()
    is_folder, offline = folder.is_dir(), named.resolved is None
    place = str(folder) if is_folder else name
    # By the name of the revision, not its commit: a cached copy can be found offline only by that name.
    options: dict[str, Any] = {} if is_folder else {"revision": cfg.revision, "local_files_only": offline}
    try:
        if not cfg.trust_remote_code and _has_fast_file(place, is_folder, options):
            # Directly from tokenizer.json: model classes rebuild it by their own rules and may split text differently.
            return completed(PreTrainedTokenizerFast.from_pretrained(place, **options), place, **options)
        from transformers import AutoTokenizer  # which imports torch

        found = AutoTokenizer.from_pretrained(place, trust_remote_code=cfg.trust_remote_code, **options)
        tokenizer = completed(usable(found), place, **options)
    except (OSError, ValueError, KeyError) as error:
        if offline:
            raise UserError(hub.explain_unreachable("tokenizer", name, named.unreachable)) from None
        raise UserError(f"tokenizer {name!r} can't be loaded: {error}") from None
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise UserError(f"tokenizer {name!r} ({kind}) has no fast version: choose one with a tokenizer.json")
    return tokenizer


def _has_fast_file(name: str, is_folder: bool, options: dict[str, Any]) -> bool:
    if is_folder:
        return (Path(name) / "tokenizer.json").exists()
    try:
        hf_hub_download(name, "tokenizer.json", **options)
        return True
    except hub_errors.LocalEntryNotFoundError:
        raise
    except hub_errors.EntryNotFoundError:
        return False


def _wrap(backend: Backend, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _train_bpe(cfg: TokenizerConfig, text: Iterator[str]) -> Backend:
    """Trains a byte-level BPE; raises UserError if the vocabulary is too small for all bytes."""
    size, smallest = cfg.vocab_size or 0, len(training.ALPHABET) + 1
    if size < smallest:
        found = f"tokenizer.vocab_size={cfg.vocab_size} is too small for a BPE of all bytes and {END_OF_TEXT}"
        raise UserError(f"{found}; set tokenizer.vocab_size={smallest} or more")
    return training.train(text, size, cfg.min_frequency or 0, END_OF_TEXT)


def _at_most(text: Iterator[str], characters: int | None) -> Iterator[str]:
    """Yields the first `characters` characters of a text, or all of it for None."""
    left = sys.maxsize if characters is None else characters
    for part in text:
        if left <= 0:
            return
        yield part[:left]
        left -= len(part)


def _bytes() -> Backend:
    """Builds a byte-level BPE without merges: id b is byte b, id 256 the end of text."""
    backend = Backend(models.BPE(vocab={letter: byte for byte, letter in bytes_to_unicode().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _characters(texts: Callable[[str], Iterator[str]]) -> Backend:
    """Builds a tokenizer with one id per character of the corpus, in code point order, then unknown and end of text.

    The characters of the validation text are included, as in nanoGPT: an unknown character in it would change what its
    loss means. Only a prompt can hold an unknown character.
    """
    seen: set[str] = set()
    for name in ("train", "val"):
        for part in texts(name):
            seen.update(part)
    vocab = {c: i for i, c in enumerate([*sorted(seen), UNKNOWN])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END_OF_TEXT, UNKNOWN])
    return backend


def numbers(size: int) -> PreTrainedTokenizerFast:
    """Builds a stand-in for an unknown tokenizer of `size` ids: text is ids in decimal, separated by white space."""
    backend = Backend(models.WordLevel(vocab={str(i): i for i in range(size)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def shows_numbers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer is the stand-in of `numbers`, whose text is not what the tokens stand for."""
    return all(token == str(number) for token, number in tokenizer.get_vocab().items())


def file_hashes(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a saved tokenizer, by name; empty if the folder doesn't exist.

    Raises:
        OSError: a file can't be read, or is not a regular file.
    """
    if not folder.is_dir():
        return {}
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(files)}


def gives_ids_of(folder: Path, known: str) -> bool:
    """Returns whether a folder's tokenizer.json gives the ids of the tokenizer with hash `known`.

    Raises:
        OSError, ValueError: it can't be read.
    """
    plain = json.loads(read_regular(folder / "tokenizer.json"))
    if not isinstance(plain, dict):
        raise ValueError("it holds no JSON object")
    as_loaded = json.loads(Backend.from_str(json.dumps(plain)).to_str())
    return known in (ids_hash(plain), ids_hash(as_loaded))
