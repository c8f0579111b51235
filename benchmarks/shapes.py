"""The models and data of a benchmark: a few shapes based on lmtrain's presets, and plain bins of random tokens."""

import importlib.util
import os
import pickle
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRAIN_TOKENS, VAL_TOKENS = 2_000_000, 100_000
LEARNING_RATE = 1e-3  # constant, the same for every contender
# lmtrain's default logger, if its package is installed.
LOGGER = () if importlib.util.find_spec("tensorboard") else ("logger=none",)


@dataclass(frozen=True)
class Shape:
    """One model, its rows, and its number of tokens; other contenders' settings follow from the composed config."""

    model: tuple[str, ...]  # lmtrain overrides
    seq_len: int
    rows: int  # per optimizer step
    vocab_size: int


SHAPES = {
    # A step of 50 to 100 ms on two cores, for which the overhead outside the model is guaranteed to be small.
    "nano": Shape(("model=gpt_nano",), seq_len=256, rows=4, vocab_size=4096),
    # The model of nanoGPT's recipe for a CPU.
    "char": Shape(
        (
            "model=gpt_nano",
            "model.num_hidden_layers=4",
            "model.num_attention_heads=4",
            "model.hidden_size=128",
            "model.max_position_embeddings=64",
            "model.vocab_multiple_of=1",
        ),
        seq_len=64,
        rows=12,
        vocab_size=65,
    ),
    # litgpt supports exactly this model; instead of GPT-2 it only has a variant with rotary positions.
    "llama": Shape(("model=llama_nano",), seq_len=256, rows=2, vocab_size=4096),
    # 124 M parameters, for a GPU.
    "small": Shape(("model=gpt_small", "tokenizer=bpe"), seq_len=1024, rows=32, vocab_size=50257),
}


def write_bins(folder: Path, vocab_size: int, embedding_rows: int) -> None:
    """Writes bins in nanoGPT's layout: train.bin and val.bin of uint16, and the vocabulary size in meta.pkl."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, tokens in (("train", TRAIN_TOKENS), ("val", VAL_TOKENS)):
        write_bin(folder / f"{split}.bin", random.integers(0, vocab_size, tokens, dtype=np.uint16), vocab_size)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": embedding_rows}))


def write_bin(path: Path, ids: "np.ndarray[tuple[int], np.dtype[np.uint16]]", vocab_size: int) -> None:
    """Writes one split. Without a tokenizer the largest id sets the vocabulary size, so the last id has to occur."""
    ids[0] = vocab_size - 1
    ids.tofile(path)


def python_files(packages: bool) -> list[Path]:
    """Returns the standard library's files without tests; with `packages` also those of the packages, mixed."""
    places = [os.path.dirname(os.__file__), *(sysconfig.get_path("purelib") for _ in range(packages))]
    files = [file for place in dict.fromkeys(places) for file in sorted(Path(place).glob("**/*.py"))]
    files = [f for f in files if "test" not in f.parts and (packages or "site-packages" not in f.parts)]
    if packages:
        files = [files[i] for i in np.random.default_rng(0).permutation(len(files))]
    return files


def write_text_bins(folder: Path, train_tokens: int, val_tokens: int, packages: bool = False) -> None:
    """Writes the bytes of the running Python's standard library, about 10 MB: real text that every machine has.

    packages: of the installed packages too, some 200 MB, in an order that mixes them.
    """
    folder.mkdir(parents=True)
    text = bytearray()
    for file in python_files(packages):
        text += file.read_bytes() + b"\n\n"
        if len(text) >= train_tokens + val_tokens:
            break
    ids = np.frombuffer(bytes(text), dtype=np.uint8).astype(np.uint16)
    write_bin(folder / "val.bin", ids[:val_tokens].copy(), 256)
    write_bin(folder / "train.bin", ids[val_tokens : val_tokens + train_tokens].copy(), 256)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def overrides(shape: Shape, bins: Path, *, micro_batch_size: int, steps: int, every: int, precision: str) -> list[str]:
    """Returns the arguments of `python -m lmtrain.train` for this shape on these bins, with defaults otherwise."""
    return [
        *shape.model,
        *LOGGER,
        "data=bins",
        f"data.path={bins}",
        f"data.cache_dir={bins.parent / 'cache'}",
        f"data.seq_len={shape.seq_len}",
        f"data.global_batch_size={shape.rows}",
        f"data.micro_batch_size={micro_batch_size}",
        "optimizer=adamw",
        f"optimizer.lr={LEARNING_RATE}",
        "schedule=constant",
        f"trainer.max_steps={steps}",
        f"trainer.log_every_n_steps={every}",
        "trainer.devices=1",
        f"trainer.precision={'bf16-mixed' if precision == 'bf16' else '32-true'}",
        # Validation only after the last step, and short, so that it interrupts no contender's steps.
        "trainer.val_check_interval=null",
        "trainer.limit_val_batches=1",
        "trainer.save_every_n_steps=null",
        "callbacks.samples.every_n_validations=0",
        "export.enabled=false",
    ]
