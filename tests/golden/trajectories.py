"""Golden trajectories: the losses of 30 CPU steps of each experiment, kept in git.

python tests/golden/trajectories.py [EXPERIMENT ...]

records the named experiments, or all. It refuses a tree with uncommitted changes, so that the commit that changes the
numbers is the one that explains why.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPO = HERE.parents[1]
sys.path.insert(0, str(REPO / "tests" / "helpers"))  # when run as a script; pytest finds it anyway

from chats import write_rows  # noqa: E402
from lmtrain.config.compose import compose  # noqa: E402
from lmtrain.distributed.devices import cpu_multiplies_bf16  # noqa: E402
from tiny_pretrained import save_pretrained  # noqa: E402

FILE = HERE / "losses.json"
STEPS = 30
# Every experiment runs on the same small text, in fp32 on one thread, at a size that takes a CPU seconds.
COMMON = [
    "trainer.precision=32-true",
    "trainer.num_threads=1",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=15",
    "trainer.val_before_training=false",
    "trainer.limit_val_batches=2",
    "trainer.save_every_n_steps=null",
    "schedule.warmup_steps=5",
    "schedule.warmup_ratio=null",
    "export.enabled=false",
    "logger=none",
    "callbacks.samples.every_n_validations=0",
    "data.global_batch_size=12",
    "data.micro_batch_size=6",
]
SHRINK = [
    "data=text", "data.seq_len=64",
    "tokenizer=bytes", "model.num_hidden_layers=2", "model.hidden_size=64", "model.num_attention_heads=4",
]  # fmt: skip
# Fine-tuning starts from a tiny random model; conversations are plain text, since its tokenizer is bytes.
# The template is lmtrain's vicuna of before, with a space after the end token, so that the losses remain comparable.
TEMPLATE = f"data.chat_template={HERE / 'vicuna_with_space.jinja'}"
FINE_TUNE = ["data.source=files", "data.seq_len=512", TEMPLATE, "optimizer.lr=0.003"]
# With these, all x86 CPUs use the same kernels and round alike.
KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
# Experiments that are small enough already are not shrunk.
AS_IT_STANDS = {"shakespeare_char"}


def experiments() -> list[str]:
    """Returns all experiments but those that train on their own samples, which differ between CPUs (test_grpo.py)."""
    return sorted(p.stem for p in (REPO / "conf" / "experiment").glob("*.yaml") if not p.stem.startswith("grpo"))


def takes_muon(name: str) -> bool:
    return str(compose([f"experiment={name}"]).optimizer.name) == "muon"


def make_text(path: Path) -> None:
    """Writes about 60 kB of sentences that follow a rule, the same on every machine."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    lines = [
        f"{words[a % 10]} plus {words[b % 10]} is {(a % 10) + (b % 10)}." for a in range(50) for b in range(a, a + 40)
    ]
    path.write_text("\n".join(lines) + "\n")


def material(name: str, folder: Path, data: Path) -> list[str]:
    """Writes the experiment's training data into the folder `data`; returns the overrides that make it small."""
    data.mkdir()
    fine_tuned = {"sft_gsm8k": "gsm8k"}.get(name) or next(
        (option for part, option in (("dpo", "preference_jsonl"), ("sft", "chat_jsonl")) if part in name), None
    )
    if fine_tuned is not None:
        write_rows(data / "rows.jsonl", fine_tuned)
        save_pretrained(folder / "pretrained", max_position_embeddings=512)
        return [*FINE_TUNE, f"model.name_or_path={folder / 'pretrained'}"]
    make_text(data / "text.txt")
    return ["data=text", "data.seq_len=64"] if name in AS_IT_STANDS else SHRINK


def trajectories(names: list[str]) -> dict[str, Any]:
    """Returns {experiment: {train: losses of all steps, val: losses of all validations}}, run by the real command.

    With Muon also {muon: bf16 or fp32}, the precision in which it orthogonalises on this CPU; {error: text} of one that
    fails. All run in one other process, whose libraries read KERNELS when they are loaded.
    """
    env = {**os.environ, **KERNELS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, __file__, "--here", str(found), *names], check=True, capture_output=True, env=env
        )
        losses = json.loads(found.read_text())
    precision = {"muon": "bf16" if cpu_multiplies_bf16() else "fp32"}
    return {name: {**(precision if takes_muon(name) else {}), **losses[name]} for name in names}


def here(name: str) -> dict[str, Any]:
    """Runs one experiment in this process; returns its losses, or its error."""
    from lmtrain import train

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as said:
        data, run_dir = Path(folder) / "data", Path(folder) / "run"
        settings = [*COMMON, *material(name, Path(folder), data)]
        os.environ["LMTRAIN_CACHE"] = f"{folder}/cache"
        if train.main(
            [f"experiment={name}", *settings, f"data.path={data}", "data.val_fraction=0.1", f"run.dir={run_dir}"]
        ):
            return {"error": said.getvalue()}
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {part: [row[f"{part}/loss"] for row in rows if f"{part}/loss" in row] for part in ("train", "val")}


def main(names: list[str]) -> int:
    """Records the named experiments, or all."""
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], cwd=REPO, check=True, capture_output=True, text=True
    ).stdout.strip()
    if dirty:
        print(f"uncommitted changes; commit them first, so that it is known what these numbers belong to:\n{dirty}")
        return 1
    golden = json.loads(FILE.read_text()) if names else {}
    for name, found in trajectories(names or experiments()).items():
        golden[name] = found
        print(f"{name}: {golden[name]['train'][0]:.5f} ... {golden[name]['train'][-1]:.5f}", flush=True)
    FILE.write_text(json.dumps(dict(sorted(golden.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        Path(sys.argv[2]).write_text(json.dumps({name: here(name) for name in sys.argv[3:]}))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
