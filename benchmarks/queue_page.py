"""The page of the queue's results, benchmarks/gpu/README.md, written by `gpu_queue.py --page`."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from code_versions import code_of
from computed import GOALS, expected
from queue_parts import PARTS

HEAD = """\
# Measured on GPUs

Written by `python benchmarks/gpu_queue.py --page` from results.jsonl, which has every round, the versions, the commit
and the command of each number. "Earlier code" marks numbers whose part depends on files that have changed since.
"""


def numbers_of(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the (name, number) pairs of a part that get a row each."""
    for name, ms in (found.get("step_ms") or {}).items():  # pretrain.py
        yield f"{name}, ms a step", f"{ms:.2f}"
    for name, of in found.get("variants", {}).items():  # leg_switches.py
        yield name, f"{of['step_ms']:.2f} ms a step, {of['peak_gib']:.1f} GiB, last loss {of['losses'][-1]:.4f}"
        kinds = of.get("kernels", {}).get("kinds", {})
        if kinds:
            yield f"{name}, kernels", "; ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.items() if ms >= 0.1)
    if "unit" in found:  # sft.py, dpo.py
        for name, rounds in found["rounds"].items():
            per_s, gib = (median(r[key] for r in rounds) for key in ("per_s", "peak_gib"))
            yield f"{name}, {found['unit']}/s", f"{per_s:,.1f}, {gib:.1f} GiB"
    for who, of in found.items():  # learning.py
        if isinstance(of, dict) and "val_loss" in of:
            there = f"; at nanoGPT's at step {of['reached_at_step']}" if of.get("reached_at_step") else ""
            yield f"{who}, val/loss", f"{of['val_loss']:.4f}{there}; the process took {of['process_s']:.0f} s"
    if "depth" in found:
        made = (found["forecast"] or {}).get("val/bits_per_byte")
        off = f", forecast {made:.3f}" if made else ""
        yield f"depth {found['depth']}, bits per byte", f"{found['bits_per_byte']:.3f}{off}"
    for name, of in found.get("runs", {}).items():
        yield name, ", ".join(f"{key} {value}" for key, value in of.items() if isinstance(value, int | float | str))
    for name, of in found.get("tokens_per_s", {}).items():  # rollouts.py
        yield f"{name}, tokens/s", f"{of['rollouts']:,.0f}, generate {of['generate']:,.0f}"
    for key in ("said", "failed", "compared"):
        if found.get(key):
            yield key, str(found[key])[:200].replace("\n", " ")


def write(rows: list[dict[str, Any]], page: Path) -> int:
    lines = [HEAD]
    for card in sorted({row["card"] for row in rows}):
        newest = {row["part"]: row for row in rows if row["card"] == card and row["part"] in PARTS}
        made = {row["part"]: row for row in rows if row["card"] == card and "numbers" in row and row["part"] in PARTS}
        lines += [
            f"\n## {card}\n",
            "| | | measured | computed | to be reached | when |",
            "| - | - | -: | -: | -: | - |",
        ]
        computed = expected()
        for name in [name for name in PARTS if name in made]:
            row = made[name]
            when = f"{row['date']}, {row['commit'][:8]}, torch {row['versions']['torch']}"
            when += "" if row["code"] == code_of(PARTS[name].files) else ", earlier code"
            for what, value in numbers_of(row["numbers"]):
                key = f"{name} {what}"
                lines.append(f"| {name} | {what} | {value} | {computed.get(key, '')} | {GOALS.get(key, '')} | {when} |")
        failed = [f"- {name}: {row['error'].splitlines()[-1][:200]}" for name, row in newest.items() if "error" in row]
        lines += ["\nFailed:\n", *failed] if failed else []
        queued = [f"- {name}: {part.question}" for name, part in PARTS.items() if name not in made]
        lines += ["\nQueued:\n", *queued] if queued else []
    if not rows:
        lines += ["\nQueued:\n", *(f"- {name}: {part.question}" for name, part in PARTS.items())]
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join(lines) + "\n")
    return 0
