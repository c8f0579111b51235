"""A stream through a ring on disk, without a model: its speed, its use of disk and memory, and whether a reader that is
killed and resumed reads the same as one that is not killed.

python benchmarks/stream.py --text pages.jsonl --ring-bytes 200000000 --kills 5
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import lmtrain
from lmtrain.callbacks.step_numbers import resident_bytes
from lmtrain.data import order
from lmtrain.data.stream.head import prepare_head
from lmtrain.data.stream.ring import Producer, StreamRows, make_ring
from lmtrain.data.stream.source import Place
from lmtrain.files import read_jsonl

SAVE_EVERY = 20  # steps


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="jsonl with a column text")
    parser.add_argument("--folder", type=Path, default=Path("stream"), help="for all that is written (%(default)s)")
    parser.add_argument("--ring-bytes", type=int, default=200_000_000, help="of the ring (%(default)s)")
    parser.add_argument("--rows", type=int, default=4096, help="of 256 tokens in a step (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="of the second reader, at random moments (%(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the folder of a reader
    return parser.parse_args()


def read(options: argparse.Namespace, folder: Path) -> None:
    """Reads one epoch from the position saved in `folder` and writes a line per step."""
    config = lmtrain.compose(
        ["data=jsonl", f"data.path={options.text.resolve()}", "data.streaming=true", "tokenizer=bpe",
         f"data.ring_bytes={options.ring_bytes}", "tokenizer.vocab_size=512", "tokenizer.train_characters=2000000",
         "data.seq_len=256", f"data.global_batch_size={options.rows}",
         f"data.cache_dir={options.folder.resolve() / 'cache'}"]
    )  # fmt: skip
    head = prepare_head(config.data, config.tokenizer, progress=False)
    rows = StreamRows(make_ring(config, "uint16"))
    rows.folder, state = folder / "ring", folder / "state.json"
    shutil.rmtree(rows.folder, ignore_errors=True)
    rows.folder.mkdir()
    step, window, place = json.loads(state.read_text()) if state.exists() else (0, 0, head.begin)
    producer = Producer(head, rows.ring, rows.folder, window, Place(*place), patience=10)
    producer.start()
    with (folder / "steps.jsonl").open("a") as lines:
        while True:
            window = rows.ring.window_of(step)
            producer.discard_before(window)
            if producer.begins[window].epoch:  # the text starts again
                break
            while not producer.wait_for(rows.ring.window_after(step), 1.0):
                if producer.error is not None:
                    raise producer.error
            if step % SAVE_EVERY == 0:
                temporary = folder / "state.tmp"
                temporary.write_text(json.dumps([step, window, producer.begins[window]]))
                os.replace(temporary, state)
            found = order.step_rows(step, rows=len(rows), global_batch_size=options.rows, seed=1)
            digest = hashlib.sha256(np.ascontiguousarray(rows.read(found)["input_ids"].numpy())).hexdigest()
            line = {
                "step": step,
                "digest": digest,
                "disk": on_disk(rows.folder),
                "rss": resident_bytes(),
                "at": time.time(),
            }
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            step += 1
    producer.stop()


def on_disk(folder: Path) -> int:
    """Returns the bytes of the ring, including files that are being written."""
    total = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the file was renamed or removed meanwhile
            total += file.stat().st_size
    return total


def reader(options: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["--text", options.text, "--folder", options.folder, "--ring-bytes", options.ring_bytes]
    words += ["--rows", options.rows, "--worker", folder]
    return subprocess.Popen([sys.executable, __file__, *map(str, words)])


def killed(options: argparse.Namespace, folder: Path, last: int) -> list[int]:
    """Returns the steps at which the reader was killed, each chosen at random among the remaining ones."""
    at, rng, steps = [], random.Random(0), folder / "steps.jsonl"
    for goal in sorted(rng.sample(range(1, last), options.kills)):
        process = reader(options, folder)
        while process.poll() is None and steps_made(steps) < goal:
            time.sleep(0.02)
        process.kill()
        process.wait()
        at.append(steps_made(steps))
    if reader(options, folder).wait() != 0:
        raise SystemExit("the reader that was killed did not end")
    return at


def steps_made(file: Path) -> int:
    if not file.exists() or not (lines := file.read_bytes().split(b"\n")[:-1]):
        return 0
    return int(json.loads(lines[-1])["step"]) + 1


def main() -> int:
    options = parse()
    if options.worker:
        read(options, options.worker)
        return 0
    whole, other = options.folder / "whole", options.folder / "killed"
    for folder in (whole, other):
        shutil.rmtree(folder, ignore_errors=True)
    if reader(options, whole).wait() != 0:
        return 1
    rows = list(read_jsonl(whole / "steps.jsonl"))
    kills = killed(options, other, len(rows))
    again = {row["step"]: row["digest"] for row in read_jsonl(other / "steps.jsonl")}
    repeated = [row["digest"] for row in read_jsonl(other / "steps.jsonl")]
    seconds = rows[-1]["at"] - rows[0]["at"]
    tokens = len(rows) * options.rows * 256
    print(f"{options.text.stat().st_size / 1e6:,.0f} MB, {tokens:,} tokens in {len(rows)} steps, {seconds:.0f} s, "
          f"{tokens / seconds:,.0f} tokens/s")  # fmt: skip
    print(f"disk at most {max(row['disk'] for row in rows) / options.ring_bytes:.3f} of the ring")
    for part in range(4):
        quarter = rows[part * len(rows) // 4 : (part + 1) * len(rows) // 4]
        print(f"memory, quarter {part + 1}: at most {max(row['rss'] for row in quarter) / 2**20:,.0f} MiB")
    same = again == {row["step"]: row["digest"] for row in rows}
    verdict = "equal" if same else "NOT EQUAL"
    print(f"killed at {kills}, {len(repeated) - len(again)} steps read twice: the rows are {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
