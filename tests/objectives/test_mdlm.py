"""Masked diffusion: the loss against closed forms and a plain forward, and that a model learns."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers_models import VOCAB, wrapped
from inprocess import run, train_tiny
from lmtrain.data.loaders import ValidationDataset
from lmtrain.data.text.windows import empty_window
from lmtrain.errors import UserError
from lmtrain.objectives.mdlm import ATTENTION, MDLM, Masked, bidirectional, draw, draw_for
from loopback_hub import HUB
from support import rows
from tiny_pretrained import SHORT, save_pretrained

MASK = 0
MDLM_ARGS = ["objective=mdlm"]


def an_objective(family: str, **changes: Any) -> Any:
    """Builds an MDLM around a tiny model, with only the attributes that the losses read."""
    model = wrapped(family, **changes)
    model.model.set_attn_implementation(ATTENTION)
    objective = MDLM.__new__(MDLM)
    pl.LightningModule.__init__(objective)
    objective.model, objective.mask_id, objective.min_time = model, MASK, 1e-3
    return objective


class Text:
    """Rows of random tokens."""

    def __init__(self, count: int, length: int) -> None:
        self.ids = torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        ids = self.ids[torch.from_numpy(rows[:, 1].copy())]
        return {"input_ids": ids, "labels": ids}

    def empty(self) -> dict[str, torch.Tensor]:
        return empty_window(self.ids.shape[1], False)


def validated(
    objective: Any, text: Text, micro_batch_size: int, ranks: int, seed: int = 0, joined_tokens: int | None = None
) -> dict[str, float]:
    """Returns the means of a validation, with the ranks run one after the other."""
    torch.manual_seed(seed)
    objective.seed, objective.val_sums = seed, {}
    for rank in range(ranks):
        data = ValidationDataset(text, micro_batch_size=micro_batch_size, limit=None, rank=rank, world_size=ranks,
                                 joined_tokens=joined_tokens)  # fmt: skip
        objective._trainer = SimpleNamespace(testing=False, val_dataloaders=SimpleNamespace(dataset=data))
        with torch.no_grad():
            for index in range(len(data)):
                objective.eval().validation_step(data[index], index)
    sums = {name: float(value) for name, value in objective.val_sums[0].items()}
    return objective.means_of(sums, sums.pop("n_tokens"))


@pytest.mark.parametrize(("micro_batch_size", "ranks", "seed"), [(1, 1, 1), (5, 1, 2), (3, 2, 3), (16, 3, 4)])
def test_a_validation_is_one_number(micro_batch_size: int, ranks: int, seed: int) -> None:
    """The seed, the split and the number of ranks don't change it, even if some ranks have no rows left."""
    objective, text = an_objective("llama"), Text(23, 16)
    found, expected = validated(objective, text, micro_batch_size, ranks, seed), validated(objective, text, 23, 1)
    assert found == pytest.approx(expected, rel=1e-6)
    assert expected["loss_se"] > 0


def test_joined_micro_batches_hide_the_same_tokens() -> None:
    objective, text = an_objective("llama"), Text(23, 16)
    expected = validated(objective, text, 5, 2)
    text.lengths = np.full(23, 16)
    joined = ValidationDataset(text, micro_batch_size=5, limit=None, rank=0, world_size=2, joined_tokens=160)
    assert len(joined[0]["input_ids"]) > 5
    assert validated(objective, text, 5, 2, joined_tokens=160) == pytest.approx(expected, rel=1e-6)


def test_64_rows_are_as_good_as_60_draws() -> None:
    """It is within 2 % of the mean of 60 passes with training's draws, in agreement with its standard error."""
    objective, text = an_objective("llama"), Text(64, 32)
    with torch.no_grad():
        for p in objective.model.parameters():
            p *= 4  # spreads the tokens' probabilities
        found = validated(objective, text, 4, 1)
        torch.manual_seed(1)
        batch = {"input_ids": text.ids}
        draws = torch.tensor([float(objective.train().micro_batch_loss(batch).loss_sum) for _ in range(60)])
    expected, error = draws.mean() / text.ids.numel(), draws.std() / text.ids.numel() / math.sqrt(60)
    assert found["loss"] == pytest.approx(expected.item(), rel=0.02)
    assert abs(found["loss"] - expected.item()) < 3 * math.hypot(found["loss_se"], error.item())
    assert found["loss_se"] < 0.05 * found["loss"]


def test_validation_draws_run_over_all_shares_evenly() -> None:
    """Among consecutive rows, each tenth of the range of masked shares has a tenth of the rows, give or take two."""
    masked = draw_for(list(range(1000)), 50, torch.device("cpu"))
    counts = masked.where.sum(1)
    torch.testing.assert_close(masked.times[:, 0], counts / 50)
    assert (counts.min(), counts.max()) == (1, 50)
    for start in (0, 137, 900):
        shares = torch.histc(masked.times[start : start + 100, 0] - 0.01, bins=10, min=0, max=1)
        assert (shares - 10).abs().max() <= 2
    assert (masked.where.float().mean(0) - 0.51).abs().max() < 0.06, "every position is as likely to be hidden"


def test_rows_that_train_nothing_weigh_nothing() -> None:
    """A rank with no rows left in a step or a validation gets a row without labels, which must count for nothing."""
    objective, text = an_objective("llama"), Text(3, 16)
    parts = objective.micro_batch_loss(text.empty())
    assert (parts.n_tokens.item(), parts.loss_sum.item()) == (0, 0.0)


def test_a_model_that_knows_nothing_costs_the_logarithm_of_the_vocabulary() -> None:
    """Each token is masked with probability t and weighted 1 / t, so the mean is log V for every t."""
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
    """The loss equals that of transformers' eager attention with an all-zero mask, which hides no token."""
    objective = an_objective(family)
    hf = objective.model.model.eval()
    ids = torch.randint(1, VOCAB, (3, 16), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    masked = draw(3, 16, 1e-3, ids.device)
    found = -objective.masked_log_probs(ids, masked).tokens
    hf.set_attn_implementation("eager")
    logits = hf(ids.masked_fill(masked.where, MASK), attention_mask=torch.zeros(3, 1, 16, 16)).logits
    expected = F.cross_entropy(logits[masked.where], ids[masked.where], reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    hf.set_attn_implementation(ATTENTION)
    last_changed = torch.cat([ids[:, :-1], ids[:, -1:] % (VOCAB - 1) + 1], dim=1)
    first_only = Masked(torch.zeros_like(masked.where).index_fill(1, torch.tensor([0]), True), masked.times)
    first, other = (objective.masked_log_probs(text, first_only).tokens for text in (ids, last_changed))
    assert not torch.allclose(first, other)


def test_routers_of_a_mixture_are_balanced() -> None:
    """The gradient and the records have the routers' loss, with the weight of the model's config."""
    objective, text = an_objective("qwen3_moe", router_aux_loss_coef=0.1), Text(4, 16)
    losses = objective.model.router_losses
    ids = text.ids
    masked = draw_for([0, 1, 2, 3], 16, ids.device)
    plain = objective.row_losses({"input_ids": ids}, masked)[0].sum()
    parts = objective.eval().micro_batch_loss({"input_ids": ids})
    out = objective.masked_log_probs(ids, masked)
    assert out.router_loss > 0
    torch.testing.assert_close(parts.loss_sum, plain + ids.numel() * out.router_loss)
    assert validated(objective, text, 2, 1).keys() == {"loss", "loss_se", *losses.names()}


@pytest.mark.parametrize(
    ("options", "said"), [({"softcap": 30.0}, "softcap"), ({"sliding_window": 4}, "sliding_window=4"), ({}, None),
                          ({"sliding_window": 8}, None), ({"s_aux": torch.zeros(2)}, "s_aux")],
)  # fmt: skip
def test_attention_that_does_more_is_refused(options: dict[str, Any], said: str | None) -> None:
    states = torch.ones(1, 2, 8, 4)
    with pytest.raises(UserError, match=f"Linear asks its attention for {said}") if said else nullcontext():
        bidirectional(torch.nn.Linear(1, 1), states, states, states, None, **options)


def test_times_cover_their_range_evenly() -> None:
    times = draw(100, 4, 0.01, torch.device("cpu")).times.flatten().sort().values
    assert 0.01 <= times.min() <= 0.02
    assert 0.99 <= times.max() <= 1
    torch.testing.assert_close(times.diff(), torch.full((99,), 0.0099), rtol=0.01, atol=1e-6)


@pytest.mark.slow
def test_it_learns_shakespeare(tmp_path: Path) -> None:
    """The loss falls well below the entropy of single characters, 3.3 nats, so the model uses the context."""
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
    apart = train_tiny(corpus, *MDLM_ARGS, "data.isolate_documents=true", f"run.dir={tmp_path}/run")
    assert apart.code == 2
    assert "Set data.isolate_documents=false" in apart.err
    full = train_tiny(corpus, *MDLM_ARGS, "model.vocab_multiple_of=1", f"run.dir={tmp_path}/run")
    assert full.code == 2
    assert "rows of the embeddings belong to tokens; add one with tokenizer.add_tokens=[HIDDEN] objective." in full.err
    added = ["tokenizer.add_tokens=[HIDDEN]", "objective.mask_token=HIDDEN", "trainer.max_steps=1"]
    pretrained = [f"model.name_or_path={save_pretrained(tmp_path / 'model')}", "data.isolate_documents=false"]
    ended = run("train", *SHORT, f"data.path={corpus}", *MDLM_ARGS, *pretrained, *added, f"run.dir={tmp_path}/grown")
    assert ended.code == 0, ended.err
    assert f"a hidden token is id {257}" in " ".join(ended.out.split())
    unknown = train_tiny(corpus, *MDLM_ARGS, "objective.mask_token=MASK", f"run.dir={tmp_path}/run")
    assert unknown.code == 2
    assert "objective.mask_token=MASK is no token here" in unknown.err
