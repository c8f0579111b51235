"""Speed of tokenizing text to disk: `lmtrain.prepare` against datasets.map and the method of nanoGPT's prepare script.

python benchmarks/prepare.py --text corpus.jsonl --tokenizer FOLDER         FOLDER holds tokenizer.json (GPT-2's)

corpus.jsonl has one document per line, {"text": ...}. In each round, every contender runs in a separate process, starts
with nothing prepared, and is timed from start to exit. benchmarks/README.md describes them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the pattern of its words
CONTENDERS = ("lmtrain", "datasets", "datasets_threads", "nanogpt_way")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a jsonl file with a column text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a byte-level BPE")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of each contender (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of datasets.map (%(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the process of a contender
    options = parser.parse_args(argv)
    options.text, options.tokenizer = options.text.resolve(), options.tokenizer.resolve()
    return options


def with_datasets(options: argparse.Namespace, threads: bool) -> int:
    """The fast tokenizer in datasets.map: in several processes, or in one with the tokenizer's own threads."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    end = [tokenizer.eos_token_id]
    rows = load_dataset("json", data_files=str(options.text), split="train", cache_dir="cache")

    def encode(batch: dict) -> dict:
        return {"ids": [ids + end for ids in tokenizer(batch["text"])["input_ids"]]}

    processes = None if threads else options.processes
    done = rows.map(encode, batched=True, remove_columns=rows.column_names, num_proc=processes)
    return sum(len(ids) for batch in done.with_format("numpy").iter(1000) for ids in batch["ids"])


def in_nanogpts_way(options: argparse.Namespace) -> int:
    """Tokenizes documents one by one with tiktoken in datasets.map, then copies them into one file of uint16."""
    import numpy as np
    import tiktoken
    from datasets import load_dataset
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = json.loads((options.tokenizer / "vocab.json").read_text())
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    end = vocabulary.pop("<|endoftext|>")
    ranks = {bytes(letters[letter] for letter in token): rank for token, rank in vocabulary.items()}
    encoding = tiktoken.Encoding("gpt2", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={"<|end|>": end})

    def encode(row: dict) -> dict:
        ids = [*encoding.encode_ordinary(row["text"]), end]
        return {"ids": ids, "length": len(ids)}

    rows = load_dataset("json", data_files=str(options.text), split="train", cache_dir="cache")
    done = rows.map(encode, remove_columns=rows.column_names, num_proc=options.processes)
    total = int(np.sum(done["length"], dtype=np.uint64))
    out, at = np.memmap("train.bin", dtype=np.uint16, mode="w+", shape=(total,)), 0
    parts = min(1024, len(done))
    for part in range(parts):
        ids = np.concatenate(done.shard(parts, part, contiguous=True).with_format("numpy")["ids"])
        out[at : at + len(ids)] = ids
        at += len(ids)
    out.flush()
    return total


def work(options: argparse.Namespace) -> int:
    if options.worker == "nanogpt_way":
        print("tokens", in_nanogpts_way(options))
    else:
        print("tokens", with_datasets(options, threads=options.worker == "datasets_threads"))
    return 0


def leg(name: str, options: argparse.Namespace, folder: Path) -> tuple[float, float, int]:
    """Returns the seconds, the peak MiB of the process and its children (sum of proportional set sizes, sampled every
    half second) and the tokens."""
    words = [__file__, "--text", options.text, "--tokenizer", options.tokenizer, "--worker", name]
    words += ["--processes", options.processes]
    if name == "lmtrain":
        words = ["-m", "lmtrain.prepare", "data=jsonl", f"data.path={options.text}", "tokenizer=hub"]
        words += [f"tokenizer.name_or_path={options.tokenizer}", "data.val_fraction=0"]
    environment = {**os.environ, "LMTRAIN_CACHE": str(folder), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("w") as log:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.5)
        seconds = time.perf_counter() - start
    if process.returncode != 0:
        raise SystemExit(f"{name}:\n{(folder / 'log').read_text()[-2000:]}")
    return seconds, peak, counted(name, folder)


def resident(pid: int) -> float:
    """Returns the MiB of a process and its children."""
    total = 0
    try:
        root = psutil.Process(pid)
        for one in (root, *root.children(recursive=True)):
            total += one.memory_full_info().pss
    except psutil.Error:
        pass
    return total / 2**20


def counted(name: str, folder: Path) -> int:
    """Returns the number of tokens that a leg reports."""
    if name == "lmtrain":
        meta = next(folder.rglob("meta.json"))
        return int(json.loads(meta.read_text())["splits"]["train"]["tokens"])
    return int((folder / "log").read_text().rsplit("tokens ", 1)[1].split()[0])


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return work(options)
    names = options.contenders.split(",")
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as folder:
                found[name].append(leg(name, options, Path(folder)))
            print(turn, name, *(f"{number:,.1f}" for number in found[name][-1]), flush=True)
    if len({leg[2] for legs in found.values() for leg in legs}) > 1:
        raise SystemExit("the contenders made different numbers of tokens")
    table = Table("contender", "s", "tokens", "tokens/s", "MB/s", f"time / {names[0]}", "(least, most)", "peak MiB")
    size = options.text.stat().st_size / 1e6
    for name, legs in found.items():
        seconds, tokens = median(leg[0] for leg in legs), legs[0][2]
        ratios = [own[0] / first[0] for own, first in zip(legs, found[names[0]], strict=True)]
        spread = f"({min(ratios):.2f}, {max(ratios):.2f})"
        numbers = f"{seconds:.1f}", f"{tokens:,}", f"{tokens / seconds:,.0f}", f"{size / seconds:.1f}"
        table.add_row(name, *numbers, f"{median(ratios):.2f}", spread, f"{max(leg[1] for leg in legs):,.0f}")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
