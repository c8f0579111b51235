"""The table that gpu_day.py appends to RESULTS.md."""

from pathlib import Path
from statistics import median
from typing import Any

from computed import GOALS, expected


def rows_of(numbers: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns (measurement, measured, computed, target) in the order of the parts."""
    rows, computed = [], expected() if numbers.get("size") == "full" else {}
    for part in sorted(numbers["parts"]):
        for name, found in numbers["parts"][part].items():
            if "not_made" in found:
                rows.append((name, f"left out: {found['not_made'].splitlines()[0][:100]}", "", ""))
                continue
            for what, value in told(found):
                key = f"{name} {what}".strip()
                rows.append((key, value, computed.get(key, ""), GOALS.get(key, "")))
    return rows


def told(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the numbers of any measurement that get a row each."""
    rows: list[tuple[str, str]] = []
    if "step_ms" in found and isinstance(found["step_ms"], dict):  # pretrain.py
        tokens = tokens_of(found["overrides"])
        rows += [(f"{name}, tokens/s", f"{1000 * tokens / ms:,.0f}") for name, ms in found["step_ms"].items()]
        ms = found["step_ms"]
        for other in ("bare", "nanogpt_model"):
            if other in ms and "lmtrain" in ms:
                rows.append((f"lmtrain's speed over {other}'s", f"{ms[other] / ms['lmtrain']:.3f}"))
    elif "losses" in found:  # loss.py
        for name, of in found["losses"].items():
            rows.append((f"{name}, ms", f"{of['ms']:.2f}"))
            if "gib" in of:
                rows.append((f"{name}, GiB", f"{of['gib']:.2f}"))
    elif "rounds" in found:  # sft.py, dpo.py
        for name, rounds in found["rounds"].items():
            per_s, gib = (median(r[key] for r in rounds) for key in ("per_s", "peak_gib"))
            rows.append((f"{name}, {found['unit']}/s", f"{per_s:,.1f}"))
            rows.append((f"{name}, GiB", f"{gib:.1f}"))
    elif "lmtrain" in found:  # learning.py
        rows.append(("val/loss", f"{found['lmtrain']['val_loss']:.4f}"))
        if "nanogpt" in found:
            rows.append(("nanoGPT's val/loss", f"{found['nanogpt']['val_loss']:.4f}"))
            over = found.get("time_over_nanogpts")
            rows.append(("time to it over nanoGPT's", f"{over:.2f}" if over else "not reached"))
    elif "tokens_per_s" in found:  # a short run
        rows.append(("tokens/s", f"{found['tokens_per_s']:,.0f}"))
        for key in ("mfu", "memory_gib", "save_stall_ms", "graphs", "graph_breaks"):
            if found.get(key) is not None:
                rows.append((key, f"{found[key]:,}"))
        rows.append(("waits of the host", f"{sum(found['waits'].values())} in {len(found['waits'])} steps"))
    else:
        rows += [("", str(found[key])) for key in ("passed", "said") if key in found]
    return rows


def tokens_of(overrides: list[str]) -> int:
    """Returns the tokens per step."""
    given = dict(word.split("=", 1) for word in overrides if word.startswith("data."))
    return int(given["data.global_batch_size"]) * int(given["data.seq_len"])


def append(results: Path, numbers: dict[str, Any]) -> None:
    """Appends the section of this day and machine, or replaces an earlier one with the same heading."""
    heading = f"## GPU day {numbers['date']}: {numbers['machine']}"
    rows = "\n".join(f"| {' | '.join(row)} |" for row in rows_of(numbers))
    section = (
        f"{heading}\n\n```\npython benchmarks/gpu_day.py\n```\n\n{numbers['setting']}.\n\n"
        f"| | measured | computed | to be reached |\n| --- | ---: | ---: | ---: |\n{rows}\n"
    )
    text = results.read_text() if results.exists() else "# Results\n"
    before, found, after = text.partition(heading + "\n")
    rest = after[after.index("\n## ") :] if found and "\n## " in after else ""
    results.write_text(f"{before.rstrip()}\n\n{section}{rest}")
