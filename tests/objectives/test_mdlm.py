"""Masked diffusion: the loss against closed forms and a plain forward, and that it learns."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from helpers_models import VOCAB, wrapped
from inprocess import run, train_tiny
from lmtrain.objectives.mdlm import ATTENTION, MDLM, Masked, draw
from loopback_hub import HUB
from support import rows

MASK = 0
MDLM_ARGS = ["objective=mdlm", "export.enabled=false", "callbacks.samples.every_n_validations=0"]


def an_objective(family: str) -> Any:
    """What micro_batch_loss reads of an objective, around a tiny model."""
    model = wrapped(family)
    model.model.set_attn_implementation(ATTENTION)
    stand_in = SimpleNamespace(model=model, mask_id=MASK, min_time=1e-3, seed=1, training=True)
    for name in ("masked_nll", "micro_batch_loss", "count_tokens"):
        setattr(stand_in, name, getattr(MDLM, name).__get__(stand_in))
    return stand_in


def test_a_model_that_knows_nothing_costs_the_logarithm_of_the_vocabulary() -> None:
    """Each token is masked with probability t and weighted 1 / t, so the mean is log V whatever t is."""
    objective = an_objective("llama")
    objective.model.model.lm_head.weight.data.zero_()
    torch.manual_seed(0)
    ids = torch.randint(1, VOCAB, (64, 32))
    means = []
    for _ in range(40):
        parts = objective.micro_batch_loss({"input_ids": ids})
        assert parts.n_tokens == ids.numel()
        means.append(float(parts.loss_sum.detach() / parts.n_tokens))
    error = torch.tensor(means).std().item() / math.sqrt(len(means))
    assert abs(sum(means) / len(means) - math.log(VOCAB)) < 3 * error
    assert error < 0.05 * math.log(VOCAB)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_masked_tokens_are_predicted_from_both_sides(family: str) -> None:
    """Against transformers' own eager attention with a mask of zeros: nothing is hidden from anyone."""
    objective = an_objective(family)
    hf = objective.model.model.eval()
    ids = torch.randint(1, VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))
    masked = draw(3, 16, 1e-3, ids.device, torch.Generator().manual_seed(2))
    found = objective.masked_nll(ids, masked)
    hf.set_attn_implementation("eager")
    logits = hf(ids.masked_fill(masked.where, MASK), attention_mask=torch.zeros(3, 1, 16, 16)).logits
    expected = F.cross_entropy(logits[masked.where], ids[masked.where], reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    hf.set_attn_implementation(ATTENTION)
    last_changed = torch.cat([ids[:, :-1], ids[:, -1:] % (VOCAB - 1) + 1], dim=1)
    first_only = Masked(torch.zeros_like(masked.where).index_fill(1, torch.tensor([0]), True), masked.times)
    assert not torch.allclose(objective.masked_nll(ids, first_only), objective.masked_nll(last_changed, first_only))


def test_times_cover_their_range_evenly() -> None:
    times = draw(100, 4, 0.01, torch.device("cpu"), None).times.flatten().sort().values
    assert 0.01 <= times.min() <= 0.02
    assert 0.99 <= times.max() <= 1
    torch.testing.assert_close(times.diff(), torch.full((99,), 0.0099), rtol=0.01, atol=1e-6)


def test_it_learns_shakespeare(tmp_path: Path) -> None:
    """Well below the entropy of single characters, 3.3 nats: so it reads what stands around them."""
    path = HUB / "datasets" / "karpathy" / "tiny_shakespeare"
    if not path.is_dir():
        pytest.skip(f"needs tiny_shakespeare, and {path} is not there")
    text = next(p for p in path.rglob("*") if p.suffix in (".txt", ".parquet", ".csv"))
    ended = run("train", "experiment=mdlm_shakespeare", f"data.path={text}", "data.format=auto", "model.hidden_size=64",
                "model.num_hidden_layers=2", "model.intermediate_size=128", "data.seq_len=32", "trainer.max_steps=250",
                "optimizer.lr=0.01", "schedule.warmup_steps=10", "trainer.precision=32-true", "logger=none",
                "trainer.val_check_interval=250", f"run.dir={tmp_path}/run",
                "trainer.limit_val_batches=20")  # fmt: skip
    assert ended.code == 0, ended.err
    scores = [r["val/loss"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in r]
    print(scores, ended.seconds)
    assert scores[-1] < 3.0


def test_a_resumed_run_hides_the_same_tokens(corpus: Path, tmp_path: Path) -> None:
    argv = [*MDLM_ARGS, "schedule=constant", "run.resume=auto"]
    for name, steps in (("straight", 4), ("run", 2), ("run", 4)):
        ended = train_tiny(corpus, *argv, f"trainer.max_steps={steps}", f"run.dir={tmp_path}/{name}")
        assert ended.code == 0, ended.err
    ours, theirs = (
        [(r["train/loss"], r["grad_norm"]) for r in rows(tmp_path / n / "metrics.jsonl") if "train/loss" in r]
        for n in ("run", "straight")
    )
    assert ours == theirs
    assert len(ours) == 4


def test_what_it_needs_is_said(corpus: Path, tmp_path: Path) -> None:
    plain = train_tiny(corpus, "objective=mdlm", f"run.dir={tmp_path}/run")
    assert plain.code == 2
    assert "set export.enabled=false callbacks.samples.every_n_validations=0" in plain.err
    full = train_tiny(corpus, *MDLM_ARGS, "model.vocab_multiple_of=1", f"run.dir={tmp_path}/run")
    assert full.code == 2
    assert re.search(r"rows of the embeddings belong to tokens; set model\.vocab_size=\d+, or name a token", full.err)
    unknown = train_tiny(corpus, *MDLM_ARGS, "objective.mask_token=MASK", f"run.dir={tmp_path}/run")
    assert unknown.code == 2
    assert "objective.mask_token=MASK is no token here" in unknown.err
