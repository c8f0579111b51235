"""Trains a BPE tokenizer in a child process, so that a signal can interrupt it at once.

The tokenizers library handles no signals while it trains, which takes minutes on a large corpus. The process reads
pieces of text from standard input and writes the trained tokenizer's JSON to standard output.
"""

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmtrain.data.byte_bpe import processes
from lmtrain.distributed.ranks import end_with_parent
from lmtrain.errors import RunError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def train(text: Iterator[str], vocab_size: int, min_frequency: int, end_of_text: str) -> Tokenizer:
    """Trains a byte-level BPE like GPT-2's (Radford et al. 2019): every byte is a token, so any text can be encoded.

    Raises:
        RunError: the training process ended unexpectedly, for example for lack of memory.
    """
    asked = {"vocab_size": vocab_size, "min_frequency": min_frequency, "end_of_text": end_of_text}
    process = processes.start("lmtrain.data.byte_bpe.training", json.dumps({**asked, "parent": os.getpid()}))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and its exit code says how
            for part in text:
                processes.send(process.stdin, part.encode())
            process.stdin.close()
        trained = process.stdout.read()
    except BaseException:  # Ctrl-C too
        process.kill()
        raise
    finally:
        code = processes.end(process)
    if code != 0:
        raise RunError(f"the process that trained the tokenizer {processes.why(code, 'tokenizer.train_characters')}")
    return Tokenizer.from_str(trained.decode())


def main(vocab_size: int, min_frequency: int, end_of_text: str, parent: int) -> None:
    """Runs in the training process. Ctrl-C, which a terminal sends to it too, is left to the parent process."""
    processes.ignore_interrupts()
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
    parts = iter(functools.partial(processes.receive, sys.stdin.buffer), None)
    backend.train_from_iterator((part.decode() for part in parts), trainer=trainer)
    sys.stdout.buffer.write(backend.to_str().encode())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
