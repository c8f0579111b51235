"""Short runs of everything that differs on a GPU, many at a time: do they work, and do they learn the same as on a CPU?

python benchmarks/gpu_check.py --out FOLDER          about five minutes on an H200 with 16 cores
python benchmarks/gpu_check.py --out FOLDER --toy    to the end without a GPU

Each case of gpu_cases.py is a process; a line for each tells how it ended. Runs in fp32 on the GPU are compared with
the same runs on the CPU. Nothing is timed, because the processes share the machine.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_cases import ON_BOTH, cases
from shapes import write_text_bins
from workload import Row, made_conversations, made_pairs, write_model, write_shape

ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "COLUMNS": "150"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda p: Path(p).resolve(), required=True, help="logs, runs and gpu_check.json")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--seconds", type=float, default=300, help="what has not ended by then is killed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=14, help="processes at a time (%(default)s)")
    parser.add_argument("--toy", action="store_true", help="small models, on a CPU")
    return parser.parse_args(argv)


def prepare(folder: Path, wide: bool) -> None:
    """Writes the bins, the rows and the pretrained models that the cases read."""
    folder.mkdir(parents=True)
    chats, pairs = made_conversations(600), made_pairs(300)
    sides = [(pair, side) for pair in pairs for side in ("chosen", "rejected")]
    rows: dict[str, list[Row]] = {
        "chats": chats,
        "pairs": pairs,
        "unpaired": [{"prompt": p["prompt"], "completion": p[side], "label": side == "chosen"} for p, side in sides],
        "prompts": [{"prompt": pair["prompt"]} for pair in pairs],
    }
    for name, made in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    write_text_bins(folder / "bins", 2_000_000, 20_000)
    write_model(folder / "model", None, chats)
    if wide:  # two layers as wide as those of Llama 3.2 1B, for products of 8 bits
        config = write_shape(folder / "shape") / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2, "vocab_size": 4096}))
        write_model(folder / "wide", folder / "shape", chats)


def run(name: str, command: str, out: Path, until: float) -> dict[str, Any]:
    """Runs a case until it ends or `until`; returns its exit code, last line and losses."""
    folder, log, began = out / "runs" / name, out / f"{name}.log", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command.replace("RUN", str(folder)),
            shell=True,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ENV,
            start_new_session=True,
        )
        try:
            code = process.wait(max(1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    metrics, said = folder / "metrics.jsonl", log.read_text(errors="replace").strip().splitlines()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    seconds, last = time.monotonic() - began, said[-1][:200] if said else ""
    print(f"{name:16} {code:4} {seconds:6.1f} s  {losses[-1] if losses else '':8.6}  {last}", flush=True)
    return {"code": code, "seconds": seconds, "said": last, "losses": losses}


def largest_difference(found: dict[str, Any], name: str) -> str:
    """Compares the training losses of the same run on the GPU and on the CPU."""
    gpu, cpu = (torch.tensor(found.get(f"{name}_{d}", {}).get("losses", [])) for d in ("gpu", "cpu"))
    if len(gpu) != len(cpu) or not len(gpu):
        return f"{name}: not compared with the CPU"
    return f"{name}: losses on GPU and CPU differ by at most {(gpu - cpu).abs().max():.1e}"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    out, until = options.out, time.monotonic() + options.seconds
    chosen = cases(out / "data", options.toy)
    if options.only:
        unknown = set(options.only.split(",")) - set(chosen)
        if unknown:
            print(f"error: --only {','.join(unknown)}: choose among {', '.join(chosen)}", file=sys.stderr)
            return 2
        chosen = {name: chosen[name] for name in options.only.split(",")}
    if not (out / "data").exists():
        prepare(out / "data", not options.toy)
    (out / "runs").mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        made = {name: pool.submit(run, name, command, out, until) for name, command in chosen.items()}
    found = {name: of.result() for name, of in made.items()}
    (out / "gpu_check.json").write_text(json.dumps(found, indent=1))
    print(*(largest_difference(found, name) for name in ON_BOTH), sep="\n")
    failed = [name for name, of in found.items() if of["code"] != 0]
    print(f"{len(found) - len(failed)} of {len(found)} ended well; not: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
