"""What is trained in a benchmark: a few shapes of lmtrain's own presets, and plain bins of random tokens for them."""

import importlib.util
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRAIN_TOKENS, VAL_TOKENS = 2_000_000, 100_000
LEARNING_RATE = 1e-3  # constant, the same for every contender
# lmtrain's default logger, but where its package is missing.
LOGGER = () if importlib.util.find_spec("tensorboard") else ("logger=none",)


@dataclass(frozen=True)
class Shape:
    """One model, its rows, and the tokens it sees. The other contenders' settings are read off the composed config."""

    model: tuple[str, ...]  # lmtrain overrides
    seq_len: int
    rows: int  # per optimizer step
    vocab_size: int


SHAPES = {
    # A step of 50 to 100 ms on two cores: where the cost of everything around the model is promised to stay small.
    "nano": Shape(("model=gpt_nano",), seq_len=256, rows=4, vocab_size=4096),
    # The model of experiment=shakespeare_char, nanoGPT's recipe for a CPU.
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
    # litgpt trains this one weight for weight; of GPT-2 it has only a relative with rotary positions.
    "llama": Shape(("model=llama_nano",), seq_len=256, rows=2, vocab_size=4096),
    # 124 M parameters, for a GPU.
    "small": Shape(("model=gpt_small", "tokenizer=bpe"), seq_len=1024, rows=32, vocab_size=50257),
}


def write_bins(folder: Path, vocab_size: int, embedding_rows: int) -> None:
    """nanoGPT's layout: train.bin and val.bin of uint16, and in meta.pkl the rows its embedding is to have."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, tokens in (("train", TRAIN_TOKENS), ("val", VAL_TOKENS)):
        write_bin(folder / f"{split}.bin", random.integers(0, vocab_size, tokens, dtype=np.uint16), vocab_size)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": embedding_rows}))


def write_bin(path: Path, ids: "np.ndarray[tuple[int], np.dtype[np.uint16]]", vocab_size: int) -> None:
    """One split. Bins without a tokenizer have as many ids as their largest says, so the last one is made to occur."""
    ids[0] = vocab_size - 1
    ids.tofile(path)


def write_text_bins(folder: Path, train_tokens: int, val_tokens: int) -> None:
    """The bytes of the running Python's standard library, about 10 MB: text to learn, on every machine."""
    folder.mkdir(parents=True)
    files = sorted(Path(os.__file__).parent.glob("**/*.py"))
    texts = (file.read_bytes() for file in files if "site-packages" not in file.parts and "test" not in file.parts)
    text = np.frombuffer(b"\n\n".join(texts), dtype=np.uint8).astype(np.uint16)
    write_bin(folder / "val.bin", text[:val_tokens].copy(), 256)
    write_bin(folder / "train.bin", text[val_tokens : val_tokens + train_tokens].copy(), 256)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def overrides(shape: Shape, bins: Path, *, micro_batch_size: int, steps: int, every: int, precision: str) -> list[str]:
    """What follows `python -m lmtrain.train`: this shape on these bins, with the defaults of a real run otherwise."""
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
        # Only after the last step, and short: no contender's steps are interrupted.
        "trainer.val_check_interval=null",
        "trainer.limit_val_batches=1",
        "trainer.save_every_n_steps=null",
        "callbacks.samples.every_n_validations=0",
        "export.enabled=false",
    ]
