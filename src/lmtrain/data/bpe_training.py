"""Trains a BPE tokenizer in a child process, so that a signal can interrupt it at once.

The tokenizers library handles no signals while it trains, which takes minutes on a large corpus. The process reads
pieces of text from standard input, a JSON string on each line, and writes the trained tokenizer's JSON to standard
output.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmtrain.distributed.ranks import end_with_parent
from lmtrain.errors import RunError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def train(text: Iterator[str], vocab_size: int, min_frequency: int, end_of_text: str) -> Tokenizer:
    """Trains a byte-level BPE like GPT-2's (Radford et al. 2019): every byte is a token, so any text can be encoded.

    Raises:
        RunError: the training process ended unexpectedly, for example for lack of memory.
    """
    # In a process of its own, so that its memory is given back and Ctrl-C ends it.
    asked = {"vocab_size": vocab_size, "min_frequency": min_frequency, "end_of_text": end_of_text}
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        [sys.executable, "-m", "lmtrain.data.bpe_training", json.dumps({**asked, "parent": os.getpid()})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    # It reads the text line by line and prints the tokenizer.
    ended = contextlib.suppress(BrokenPipeError)  # raised where the process has ended; its exit code says how
    assert process.stdin is not None
    assert process.stdout is not None
    with ended, process:  # on leaving, the pipes are closed and the process is waited for
        try:
            with ended:
                for part in text:
                    process.stdin.write(json.dumps(part).encode() + b"\n")
                process.stdin.close()
            trained = process.stdout.read()
        except BaseException:  # Ctrl-C too
            process.kill()
            raise
    if (code := process.returncode) != 0:
        memory = ": out of memory, most likely; lower tokenizer.train_characters" if code == -signal.SIGKILL else ""
        raise RunError(f"the process that trained the tokenizer ended with exit code {code}{memory}")
    return Tokenizer.from_str(trained.decode())


def main(vocab_size: int, min_frequency: int, end_of_text: str, parent: int) -> None:
    """Runs in the training process. Ctrl-C, which a terminal sends to it too, is left to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[end_of_text],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    backend.train_from_iterator(map(json.loads, sys.stdin.buffer), trainer=trainer)
    sys.stdout.buffer.write(backend.to_str().encode())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
