"""benchmarks/gpu_queue.py: its parts run on a CPU, and it knows what is missing."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fp8_head
import gpu_queue
import kernels
import pytest
import queue_cases
import queue_page
import torch
from queue_parts import PARTS, Part, Place

from lmtrain.config.compose import compose
from lmtrain.losses import cross_entropy
from support import REPO

NEEDS_A_GPU = {"verify", "qlora_8b", "sft_fp8", "recipes", "time_to_loss"}  # or nanoGPT


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """In two processes of one thread each: fifty seconds on two idle cores."""
    names = [name for name in PARTS if name not in NEEDS_A_GPU]
    halves = names[:5], names[5:]
    queue = [sys.executable, str(REPO / "benchmarks" / "gpu_queue.py"), "--toy", "--minutes=30"]
    started = [
        subprocess.Popen([*queue, f"--only={','.join(half)}", f"--out={tmp_path}/{half[0]}"], cwd=tmp_path, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for half in halves
    ]  # fmt: skip
    for process in started:
        said, _ = process.communicate(timeout=1800)
        assert process.returncode == 0, said
    found = gpu_queue.read(*(tmp_path / half[0] / "results.jsonl" for half in halves))
    rows = {row["part"]: row for row in found}
    assert set(rows) == set(PARTS) - NEEDS_A_GPU
    variants = rows["switches"]["numbers"]["variants"]
    kinds = variants["as_is"]["kernels"]
    assert 0 < kinds["kernels_ms"] <= kinds["step_ms"]
    losses = {of["losses"][-1] for of in variants.values()}
    assert len(losses) == 1  # compiled in one region or in many, a step learns the same
    assert all(not row["numbers"]["failed"] for name, row in rows.items() if name.startswith("cases_"))
    assert sum(row["cpu_s"] for row in rows.values()) < 70
    queue_page.write([*rows.values()], tmp_path / "README.md")
    page = (tmp_path / "README.md").read_text()
    assert "| gpt_small | lmtrain, ms a step | " in page
    assert "- verify: " in page


def place(folder: Path) -> Place:
    return Place(True, folder, folder, None, None, None, {})


def test_a_part_that_fails_or_hangs_leaves_why_and_ends(tmp_path: Path) -> None:
    def fails(where: Place) -> dict:
        raise ValueError("no such kernel")

    part = Part("?", 1, (), fails)
    found = gpu_queue.attempt(part, place(tmp_path), 10)
    assert found["error"].splitlines()[-1] == "ValueError: no such kernel"
    assert "in fails" in found["error"]
    (tmp_path / "answer.json").unlink()
    found = gpu_queue.attempt(replace(part, make=lambda where: time.sleep(60)), place(tmp_path), 0.2)  # type: ignore[arg-type]
    assert found["error"] == "ended at its limit, 0 s"


def test_what_is_missing_for_this_card_and_code_comes_in_order() -> None:
    parts = {
        name: Part("?", 1, (f"conf/model/{name}.yaml",), lambda where: {}) for name in ("base", "dial", "gpt_nano")
    }
    code = {name: gpu_queue.code_of(part.files) for name, part in parts.items()}
    assert len({*code.values()}) == 3
    assert gpu_queue.waiting(parts, [], "card") == ["base", "dial", "gpt_nano"]
    rows = [{"part": "base", "card": "card", "code": "older", "numbers": {}}]
    assert gpu_queue.waiting(parts, rows, "card") == ["dial", "gpt_nano", "base"]  # measured once: comes later
    rows.append({"part": "dial", "card": "card", "code": code["dial"], "error": "..."})
    assert gpu_queue.waiting(parts, rows, "card") == ["gpt_nano", "base", "dial"]  # and what failed comes last
    rows.append({"part": "gpt_nano", "card": "card", "code": code["gpt_nano"], "numbers": {}})
    assert gpu_queue.waiting(parts, rows, "card") == ["base", "dial"]
    assert gpu_queue.waiting(parts, rows, "another card") == ["base", "dial", "gpt_nano"]
    rows[0]["seconds"] = 42
    assert gpu_queue.expected(parts["base"], "base", rows[:1], "card") == 42


def test_compile_caches_travel_in_pieces_and_only_under_their_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_queue, "PIECE", 2**17)
    out, held = tmp_path / "out", {f"inductor/{n}": os.urandom(50_000) for n in range(7)}
    out.mkdir()
    with gpu_queue.compile_caches(tmp_path / "a", "caches_x", tmp_path / "none", out):
        for number, (name, data) in enumerate(held.items()):
            file = tmp_path / "a" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            os.utime(file, (number, number))
    assert [piece.name for piece in sorted(out.iterdir())] == ["caches_x.0", "caches_x.1"]
    assert all(piece.stat().st_size <= 2**17 for piece in out.iterdir())
    with gpu_queue.compile_caches(tmp_path / "b", "caches_x", out, tmp_path):
        found = {f"inductor/{file.name}": file.read_bytes() for file in (tmp_path / "b/inductor").iterdir()}
    assert found == {name: held[name] for name in ("inductor/6", "inductor/5", "inductor/4", "inductor/3")}
    with gpu_queue.compile_caches(tmp_path / "c", "caches_y", out, tmp_path):
        assert not (tmp_path / "c").exists()


def test_kernels_are_counted_once_and_named() -> None:
    def event(key: str, ms: float, annotation: bool = False) -> SimpleNamespace:
        on = kernels.DeviceType.CPU
        return SimpleNamespace(key=key, device_type=on, is_user_annotation=annotation, count=5,
                               self_cpu_time_total=1000 * ms * kernels.STEPS)  # fmt: skip

    names = {
        "nvjet_sm90_tst_128x256": "matrix products",
        "triton_red_fused__to_copy_native_layer_norm_3": "inductor: reductions",
        "void at::native::vectorized_elementwise_kernel<4>": "uncompiled elementwise",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex": "indexing",
        "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer and clipping",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
    }
    assert {name: kernels.kind(name) for name in names} == names
    found = kernels.table([event("nvjet", 3), event("Torch-Compiled Region: 0/0", 9, True), event("triton_poi_", 2)], 6)
    assert found["kernels_ms"] == 5
    assert found["kinds"] == {"matrix products": 3, "inductor: elementwise": 2}


@pytest.mark.parametrize("head", [fp8_head.Head, fp8_head.HeadAndGradients])
def test_an_output_layer_in_8_bits_is_near_the_plain_one(head: type[fp8_head.Head]) -> None:
    torch.manual_seed(0)
    labels = torch.randint(512, (96,))
    labels[::5] = -100
    at_first = torch.randn(96, 64), torch.randn(512, 64) / 8
    found = []
    for own in (True, False):
        hidden, weight = (x.clone().requires_grad_() for x in at_first)
        if own:
            logits = cross_entropy.Logits(None, 1.0, 32, torch.float32, False)
            loss = head.apply(hidden, weight, None, labels, logits, True)
        else:
            loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
        (3 * loss).backward()
        found.append((loss.item(), hidden.grad, weight.grad))
    (loss, *ours), (expected, *plain) = found
    assert loss == pytest.approx(expected, rel=2e-3)
    for a, b in zip(ours, plain, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.06  # e4m3 rounds by up to 1/16, e5m2 by 1/8
    assert not ours[0][::5].any()


@pytest.mark.slow
def test_the_cases_compose(tmp_path: Path) -> None:
    made = queue_cases.cases(tmp_path, toy=False)
    assert {f"{name}_{device}" for name in queue_cases.ON_BOTH for device in ("gpu", "cpu")} < set(made)
    assert {"gpt_small", "int8", "pretrain_gpu"} < set(made)  # where the three parts begin
    for command in made.values():
        for words in re.findall(r"lmtrain\.(?:train|verify) (.*?)(?: &&|$)", command):
            compose(shlex.split(words))


def test_the_page_has_what_failed_and_what_is_queued(tmp_path: Path) -> None:
    row = {"part": "verify", "card": "H", "code": "older", "numbers": {"said": "exact"}, "date": "2026-11-27",
           "commit": "0123456789", "versions": {"torch": "2.11"}}  # fmt: skip
    failed = {"part": "tests", "card": "H", "code": "x", "error": "Traceback\nFailed: 2 failed"}
    queue_page.write([json.loads(json.dumps(r)) for r in (row, failed)], tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| verify | said | exact |  |  | 2026-11-27, 01234567, torch 2.11, earlier code |" in page
    assert "- tests: Failed: 2 failed" in page
    assert "- dpo: DPO of 1.24 B" in page
