"""data.dedup: seconds and memory for documents of a chosen length, and which near copies are found, by similarity.

python benchmarks/repeats.py --documents 20000 --words 300
"""

import argparse
import random
import sys
import time

from lmtrain.callbacks.step_numbers import resident_bytes
from lmtrain.data.text import repeats

SIMILARITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
PAIRS = 1000  # of each similarity
WORDS = [f"{first}{vowel}{last}" for first in "bcdfghklmnprstvwz" for vowel in "aeiou" for last in "bdgklmnprstx"]


def documents(count: int, length: int) -> list[str]:
    """Returns documents of `length` words; every tenth is a copy of an earlier one, of which one word is changed."""
    draw, found = random.Random(0), [""] * count
    for number in range(count):
        words = draw.choices(WORDS, k=length)
        if number % 10 == 9:
            words = found[draw.randrange(number)].split()
            words[draw.randrange(length)] = "changed"
        found[number] = " ".join(words)
    return found


def found_pairs(index: repeats._Near, similarity: float) -> tuple[float, float]:
    """Returns the mean similarity of pairs whose second document ends otherwise, and the share that is found."""
    ngrams = 200
    changed = round(ngrams * (1 - similarity) / (1 + similarity))
    found = 0
    for pair in range(PAIRS):
        words = [f"{similarity}-{pair}-{place}" for place in range(ngrams + 4)]
        index.is_new([" ".join(words)])
        other = words[: len(words) - changed] + [f"{word}-other" for word in words[len(words) - changed :]]
        found += not index.is_new([" ".join(other)])
    return (ngrams - changed) / (ngrams + changed), found / PAIRS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=300, help="of each document (%(default)s)")
    options = parser.parse_args()
    texts = documents(options.documents, options.words)
    size = sum(map(len, texts)) / 1e6
    for index in (repeats._Exact(), repeats._Near()):
        before, start = resident_bytes(), time.perf_counter()
        new = sum(index.is_new([text]) for text in texts)
        seconds = time.perf_counter() - start
        bytes_each = (resident_bytes() - before) / new
        print(f"{type(index).__name__}: {size:.0f} MB in {seconds:.2f} s, {size / seconds:.1f} MB/s; kept {new:,} of "
              f"{len(texts):,}; {bytes_each:,.0f} bytes of memory for each")  # fmt: skip
    for similarity in SIMILARITIES:
        exact, share = found_pairs(repeats._Near(), similarity)
        print(f"similarity {exact:.3f}: {share:.1%} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
