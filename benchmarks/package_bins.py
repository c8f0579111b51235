"""Writes bins of GPT-2's size of vocabulary from the installed packages' Python files: real text on every machine.

python benchmarks/package_bins.py FOLDER --million 30       train.bin, val.bin (300,000 tokens), meta.pkl

A byte-level BPE of 50,257 tokens is trained on a fifth of the text, which takes a minute on two cores.
"""

import argparse
import pickle
from pathlib import Path

import numpy as np
from shapes import python_files, write_bin
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

VOCAB_SIZE, VAL_TOKENS = 50257, 300_000


def read_files(n_bytes: float) -> list[str]:
    """Returns the texts of Python files, about so many bytes."""
    texts, total = [], 0
    for file in python_files(packages=True):
        texts.append(file.read_text(errors="replace") + "\n\n")
        total += len(texts[-1])
        if total > n_bytes:
            break
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--million", type=float, default=30, help="tokens, at most (%(default)s)")
    options = parser.parse_args()
    texts = read_files(4.2e6 * options.million)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[: len(texts) // 5 + 1], trainer)
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = np.concatenate([np.array(e.ids, dtype=np.uint16) for e in encoded])[: int(1e6 * options.million)]
    options.folder.mkdir(parents=True, exist_ok=True)
    write_bin(options.folder / "val.bin", ids[:VAL_TOKENS].copy(), VOCAB_SIZE)
    write_bin(options.folder / "train.bin", ids[VAL_TOKENS:].copy(), VOCAB_SIZE)
    n_bytes = sum(len(text.encode()) for text in texts) / sum(len(e.ids) for e in encoded)
    (options.folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50304, "bytes_per_token": n_bytes}))
    tokenizer.save(str(options.folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
