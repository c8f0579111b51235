"""Preference optimization end to end: the reference, the check before the first step, batch splits, resuming."""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chats import write_chats
from inprocess import Ended, message, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from lmtrain.config.batch import Stages
from lmtrain.config.compose import check, compose
from lmtrain.config.options import PREFERENCE_LOSSES, REFERENCES
from lmtrain.data.corpus import build_corpus
from lmtrain.data.loaders import StepDataset
from lmtrain.data.store import cache as store_cache
from lmtrain.errors import RunError, UserError
from lmtrain.losses.preferences import LOSSES
from lmtrain.objectives import with_reference
from lmtrain.objectives.dpo import DPO, kl_per_token
from lmtrain.objectives.reference import Choice, FrozenCopy, weights_hash
from lmtrain.objectives.start_check import check_start
from lmtrain.run.build import build_datamodule, build_objective
from lmtrain.strategies.choose import AdapterHalfPrecision
from support import rows, thinned
from tiny_pretrained import save_pretrained

DPO_RUN = [
    "objective=dpo", "data=preference_jsonl", "data.chat_template=zephyr", "data.val_fraction=0.2",
    "data.seq_len=256", "data.global_batch_size=8", "data.micro_batch_size=4", "schedule=constant",
    "schedule.warmup_steps=0", "trainer.precision=32-true", "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=4", "trainer.max_steps=8", "callbacks.samples.every_n_validations=0", "logger=none",
    "export.enabled=false",
]  # fmt: skip
LLAMA = ["model=pretrained", "optimizer.lr=3e-3"]
LORA = [*LLAMA, "peft=lora", "peft.r=4", "optimizer.lr=2e-2"]
QLORA = [*LLAMA, "peft=qlora", "peft.r=4", "optimizer.lr=2e-2"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes forty prompts with polite chosen and impolite rejected answers of very different lengths."""
    found = []
    for i in range(40):
        prompt = [{"role": "user", "content": f"{'Well, ' * (i % 5)}what is {i} plus {i}?"}]
        answers = [f"It is {2 * i}{', of course' * (i % 4)}.", f"{'No' if i % 2 else 'Go away'} {i}{'!' * (i % 7)}"]
        found.append({"prompt": prompt, **{k: [{"role": "assistant", "content": a}]
                                           for k, a in zip(("chosen", "rejected"), answers, strict=True)}})  # fmt: skip
    return write_chats(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", found)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


def test_the_precomputed_reference_is_of_all_that_the_model_computes_with(pairs: Path, llama: Path) -> None:
    """The cache key depends on settings that change the computation, but not on those of training."""

    def key(*argv: str) -> str:
        _, _, objective = built(pairs, llama, *LORA, "objective.reference=precomputed", *argv)
        assert objective.precomputed is not None
        weights.add(weights_hash(objective.model))
        return objective.precomputed.key(objective.model)

    weights: set[str] = set()
    base = key()
    others = [key("+model.extra.rms_norm_eps=0.1"), key("peft.alpha=7"), key("trainer.precision=bf16-mixed")]
    assert len({base, *others}) == 4
    assert key("objective.beta=0.3", "optimizer.lr=1e-5", "data.micro_batch_size=2", "peft.dropout=0.1") == base
    assert len(weights) == 1


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a GPT-2 with dropout everywhere, so that every training forward differs."""
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    return save_pretrained(tmp_path_factory.mktemp("gpt2"), "gpt2", n_positions=256, **dropout)


def dpo(pairs: Path, model: Path, run_dir: Path, *argv: str) -> Ended:
    fixed = [f"data.path={pairs}", f"model.name_or_path={model}", f"run.dir={run_dir}"]
    return run("train", *DPO_RUN, *fixed, *argv)


def logged(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the numbers of the training rows and of the validation rows."""
    found = [without_times(row) for row in rows(run_dir / "metrics.jsonl")]
    found = [{key: value for key, value in row.items() if key != "rows"} for row in found]
    return [r for r in found if "train/loss" in r], [r for r in found if "val/loss" in r]


def built(pairs: Path, model: Path, *argv: str) -> tuple[Any, Any, DPO]:
    """Returns (config, corpus, objective) of a run that isn't started."""
    config = check(compose([*DPO_RUN, f"data.path={pairs}", f"model.name_or_path={model}", *argv]))
    config.trainer.accelerator = "cpu"
    config.trainer.compile = config.trainer.activation_checkpointing = False
    corpus = build_corpus(config)
    objective = build_objective(config, corpus, total_steps=8)
    assert isinstance(objective, DPO)
    objective.on_placed()
    return config, corpus, objective


def batch_of(corpus: Any, *pair: int) -> dict[str, torch.Tensor]:
    return corpus.train.read(np.array([[0, p] for p in pair]))


STARTS = {
    "full": [*LLAMA],
    "full_copy": [*LLAMA, "objective.reference=frozen_copy"],
    "full_precomputed": [*LLAMA, "objective.reference=precomputed"],
    "lora": [*LORA],
    "lora_copy": [*LORA, "objective.reference=frozen_copy"],
    "lora_precomputed": [*LORA, "objective.reference=precomputed"],
    "lora_dropout": [*LORA, "peft.dropout=0.5"],
    "dora": [*LORA, "peft.use_dora=true"],
    "pissa": [*LORA, "peft.init_weights=pissa"],
    "bias": [*LORA, "peft.bias=lora_only"],
    "embeddings": [*LORA, "peft.modules_to_save=[embed_tokens]"],
    "hinge": [*LORA, "objective.loss=hinge"],
    "qlora": [*QLORA],
    "qlora_precomputed": [*QLORA, "objective.reference=precomputed"],
}


@pytest.mark.parametrize("name", thinned(STARTS, 3))
def test_every_start_is_at_zero_margin_and_margins_rise(name: str, pairs: Path, llama: Path, tmp_path: Path) -> None:
    if "qlora" in name:
        pytest.importorskip("bitsandbytes")
    ended = dpo(pairs, llama, tmp_path / "run", *STARTS[name])
    assert ended.code == 0, ended.err
    train, val = logged(tmp_path / "run")
    if name != "lora_dropout":  # its first training forward has dropout, so it differs from the start
        assert train[0]["train/loss"] == pytest.approx(1.0 if name == "hinge" else math.log(2), abs=1e-4)
        for key in ("rewards/chosen", "rewards/rejected", "rewards/margin", "kl"):
            assert train[0][f"train/{key}"] == pytest.approx(0, abs=1e-4), key
    assert train[-1]["train/rewards/margin"] > 0.1
    assert val[-1]["val/rewards/margin"] > 0.1
    assert val[-1]["val/rewards/accuracy"] > 0.8
    assert val[-1]["val/kl"] > 0
    assert "val/perplexity" not in val[-1]


def test_a_continued_adapter_is_held_to_itself(pairs: Path, llama: Path, tmp_path: Path) -> None:
    """The reference of a continued adapter is the adapter as loaded, not the bare base model."""
    first = dpo(pairs, llama, tmp_path / "first", *LORA, "export.enabled=true")
    assert first.code == 0, first.err
    adapter = tmp_path / "first" / "export"
    for reference in ("auto", "precomputed"):
        ended = dpo(
            pairs, llama, tmp_path / reference, *LORA, f"peft.adapter={adapter}", f"objective.reference={reference}"
        )
        assert ended.code == 0, ended.err
        train, _ = logged(tmp_path / reference)
        assert train[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert train[0]["train/logps/chosen"] != pytest.approx(
            logged(tmp_path / "first")[0][0]["train/logps/chosen"], abs=1
        )
        assert train[-1]["train/rewards/margin"] > 0.02
    ended = dpo(pairs, llama, tmp_path / "off", *LORA, f"peft.adapter={adapter}", "objective.reference=adapter_off")
    assert ended.code == 2
    assert "the adapter has been trained before" in message(ended.err)


@pytest.mark.parametrize("loss", thinned(PREFERENCE_LOSSES, 3))
def test_every_loss_trains(loss: str, pairs: Path, llama: Path, tmp_path: Path) -> None:
    ended = dpo(pairs, llama, tmp_path / "run", *LLAMA, f"objective.loss={loss}", "objective.sft_weight=0.1",
                "trainer.max_steps=4")  # fmt: skip
    assert ended.code == 0, ended.err
    train, val = logged(tmp_path / "run")
    assert val[-1]["val/rewards/margin"] > (train[0]["train/rewards/margin"] if LOSSES[loss].at_zero is None else 0)
    assert val[-1]["val/loss"] == pytest.approx(
        val[-1]["val/preference_loss"] + 0.1 * val[-1]["val/sft_loss"], rel=1e-5
    )
    assert ("val/kl" in val[-1]) == LOSSES[loss].has_reference


def test_the_config_knows_every_loss() -> None:
    assert set(PREFERENCE_LOSSES) == set(LOSSES)


def plain_loop(model: torch.nn.Module, steps: list[list[list[tuple[list[int], list[bool]]]]], lr: float) -> list[Any]:
    """Returns (loss, gradient norm) of DPO steps by the formula: single answers, transformers' logits, a deep copy."""
    reference = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def log_prob(of: torch.nn.Module, ids: list[int], scored: list[bool]) -> torch.Tensor:
        logits = of(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        targets = torch.tensor(ids[1:])
        return (logits[torch.arange(len(targets)), targets] * torch.tensor(scored[1:])).sum()

    found = []
    for step in steps:
        losses = []
        for chosen, rejected in step:
            with torch.no_grad():
                before = log_prob(reference, *chosen) - log_prob(reference, *rejected)
            margin = log_prob(model, *chosen) - log_prob(model, *rejected) - before
            losses.append(-F.logsigmoid(0.1 * margin))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def test_steps_equal_a_plain_loop(pairs: Path, llama: Path, tmp_path: Path) -> None:
    settings = [*LLAMA, "optimizer.lr=1e-3", "optimizer.weight_decay=0", "trainer.max_steps=4"]
    ended = dpo(pairs, llama, tmp_path / "run", *settings)
    assert ended.code == 0, ended.err
    config, corpus, objective = built(pairs, llama, *settings)
    model = objective.model.model
    model.set_attn_implementation("eager")
    dataset = StepDataset(corpus.train, seed=config.seed, sizes=Stages.constant(8), micro_batch_size=8, max_epochs=None,
                          rank=0, world_size=1)  # fmt: skip
    examples = corpus.train.examples
    steps = [
        [[tuple(part.tolist() for part in examples.read(2 * row + i)) for i in (0, 1)] for _, row in dataset.row_ids(s)]
        for s in range(4)
    ]
    for row, (loss, norm) in zip(logged(tmp_path / "run")[0], plain_loop(model, steps, 1e-3), strict=True):
        assert row["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_answers_laid_together_score_as_each_alone(pairs: Path, llama: Path) -> None:
    _, corpus, objective = built(pairs, llama, *LLAMA)
    together, _ = objective.answer_log_probs(batch_of(corpus, *range(8)))
    for p in range(8):
        alone, _ = objective.answer_log_probs(batch_of(corpus, p))
        torch.testing.assert_close(together[p], alone[0], rtol=1e-6, atol=1e-5)
    backwards, _ = objective.answer_log_probs(batch_of(corpus, *range(7, -1, -1)))
    torch.testing.assert_close(together, backwards.flip(0), rtol=1e-6, atol=1e-5)


def test_batch_splits_change_nothing(pairs: Path, llama: Path, tmp_path: Path) -> None:
    for micro in (8, 2, 1):
        ended = dpo(pairs, llama, tmp_path / str(micro), *LORA, f"data.micro_batch_size={micro}", "trainer.max_steps=4",
                    "objective.loss=kto_pair", "trainer.limit_val_batches=null")  # fmt: skip
        assert ended.code == 0, ended.err
    expected = logged(tmp_path / "8")
    for micro in (2, 1):
        for ours, theirs in zip(logged(tmp_path / str(micro)), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert a.keys() == b.keys()
                for key in a:
                    assert a[key] == pytest.approx(b[key], rel=1e-5, abs=2e-6), (micro, key)


@pytest.mark.parametrize("name", thinned(["lora", "full"], 2))
def test_splits_agree_in_half_precision(name: str, pairs: Path, llama: Path, tmp_path: Path) -> None:
    """Autocast can keep weight casts from one micro-batch to the next; the reference must not get the policy's."""
    for micro in (8, 2):
        ended = dpo(pairs, llama, tmp_path / str(micro), *STARTS[name], f"data.micro_batch_size={micro}",
                    "trainer.precision=bf16-mixed", "trainer.max_steps=4")  # fmt: skip
        assert ended.code == 0, ended.err
    for a, b in zip(logged(tmp_path / "8")[0], logged(tmp_path / "2")[0], strict=True):
        for key in ("train/rewards/margin", "train/loss"):
            assert a[key] == pytest.approx(b[key], rel=0.1, abs=0.02), (a["step"], key)
    assert a["train/rewards/margin"] > 0.1


@pytest.mark.parametrize(
    ("precision", "start"),
    thinned(
        [("bf16-true", "frozen_copy"), ("bf16-true", "pissa"), ("bf16-true", "continued"), ("16-true", "frozen_copy")],
        4,
    ),
)
def test_a_copy_is_no_weaker_reference_in_half_precision(
    precision: str, start: str, pairs: Path, llama: Path, tmp_path: Path
) -> None:
    """If autocast's cached casts of the reference's weights were used, the policy's loss would stay at ln 2."""
    settings = [*LORA, f"trainer.precision={precision}"]
    own = ["objective.reference=frozen_copy"]
    if start == "pissa":
        own = ["peft.init_weights=pissa"]
    elif start == "continued":
        first = dpo(pairs, llama, tmp_path / "first", *LORA, "trainer.max_steps=2", "export.enabled=true")
        assert first.code == 0, first.err
        own = [f"peft.adapter={tmp_path / 'first' / 'export'}"]
    ended = dpo(pairs, llama, tmp_path / "run", *settings, *own)
    assert ended.code == 0, ended.err
    assert "reference: frozen_copy" in " ".join(ended.out.replace("│", " ").split())
    train, val = logged(tmp_path / "run")
    assert train[0]["train/loss"] == pytest.approx(math.log(2), abs=0.02)
    assert train[-1]["train/loss"] < 0.6
    assert val[-1]["val/rewards/margin"] > 0.1
    if start != "frozen_copy":
        return
    ended = dpo(pairs, llama, tmp_path / "off", *settings, "objective.reference=adapter_off")
    assert ended.code == 0, ended.err
    for ours, theirs in zip(train, logged(tmp_path / "off")[0], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.15, abs=0.02), ours["step"]


class KeepsCasts(AdapterHalfPrecision):
    """The half-precision plugin with autocast's weight cache on, as it is by default in torch."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context(), torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            yield


def test_a_policy_that_stands_still_ends_the_run(
    pairs: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before the first step, that both agree, can't detect a policy computed with the reference's weights."""
    settings = [*LORA, "trainer.precision=bf16-true", "objective.reference=frozen_copy"]
    monkeypatch.setattr("lmtrain.strategies.choose.AdapterHalfPrecision", KeepsCasts)
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    ended = dpo(pairs, llama, tmp_path / "run", *settings)
    assert ended.code == 1
    found = message(ended.err)
    assert "after 1 optimizer step the policy's log-probabilities of the first micro-batch are still exactly" in found
    assert "trainer.precision (bf16-true here)" in found
    warming = ["schedule.warmup_steps=4000", "optimizer.lr=0.1"]  # 2.5e-5 a step: checked once changes must show
    ended = dpo(pairs, llama, tmp_path / "warming", *settings, *warming)
    assert ended.code == 1
    assert "after 3 optimizer steps" in message(ended.err)


def test_tiny_first_rates_end_no_run(pairs: Path, llama: Path, tmp_path: Path) -> None:
    """Neither updates that half precision rounds away nor a learning rate of 0 end a run."""
    for rate in ("1e-9", "0"):
        for precision in ("bf16-true", "32-true"):
            argv = [*LORA, f"optimizer.lr={rate}", f"trainer.precision={precision}", "trainer.max_steps=2"]
            ended = dpo(pairs, llama, tmp_path / f"{rate}_{precision}", *argv)
            assert ended.code == 0, ended.err


def test_gradients_of_splits_agree(pairs: Path, llama: Path) -> None:
    _, corpus, objective = built(pairs, llama, *LLAMA, "objective.reference=frozen_copy")
    with torch.no_grad():
        for p in objective.model.parameters():
            p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))

    def gradients(size: int) -> list[torch.Tensor]:
        objective.zero_grad()
        for start in range(0, 8, size):
            objective.micro_batch_loss(batch_of(corpus, *range(start, start + size))).loss_sum.backward()
        return [p.grad.clone() for p in objective.model.parameters()]

    whole = gradients(8)
    for size in (4, 2, 1):
        for a, b in zip(gradients(size), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize(("method", "online"), thinned([("lora", "adapter_off"), ("full", "frozen_copy")], 2))
def test_precomputed_equals_online_over_an_epoch_with_dropout(
    method: str, online: str, pairs: Path, gpt2: Path, tmp_path: Path
) -> None:
    epoch = ["trainer.max_steps=null", "trainer.max_epochs=1", "model.dropout=0.3", "optimizer.lr=1e-3"]
    argv = [*LLAMA, *epoch] if method == "full" else [*LORA, "peft.dropout=0.2", *epoch]
    for reference in (online, "precomputed"):
        ended = dpo(pairs, gpt2, tmp_path / reference, *argv, f"objective.reference={reference}")
        assert ended.code == 0, ended.err
    expected, precomputed = (logged(tmp_path / reference) for reference in (online, "precomputed"))
    assert expected[0][0]["train/loss"] != pytest.approx(math.log(2), abs=1e-3)  # dropout is on in training
    for a, b in zip(expected[0] + expected[1], precomputed[0] + precomputed[1], strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-4), key


def test_precomputed_numbers_are_kept_and_told_apart(pairs: Path, llama: Path, gpt2: Path, tmp_path: Path) -> None:
    settings = ["objective.reference=precomputed", "trainer.max_steps=1", f"data.cache_dir={tmp_path / 'cache'}"]
    first = dpo(pairs, llama, tmp_path / "a", *LLAMA, *settings)
    assert "reference log-probabilities of 32 train pairs" in first.err
    assert "of 8 val pairs" in first.err
    again = dpo(pairs, llama, tmp_path / "b", *LLAMA, *settings)
    assert "reference" not in again.err
    other = dpo(pairs, gpt2, tmp_path / "c", *LLAMA, *settings)
    assert "reference log-probabilities" in other.err
    assert len(list((tmp_path / "cache").glob("reference-*"))) == 2

    for folder in (tmp_path / "cache").glob("reference-*"):  # numbers of another model
        np.save(folder / "train.npy", np.load(folder / "train.npy") - 1)
    ended = dpo(pairs, llama, tmp_path / "d", *LLAMA, *settings)
    assert ended.code == 1
    assert "policy and reference differ before the first step" in message(ended.err)
    assert "precomputed log-probabilities are of another model" in message(ended.err)


def test_precomputed_numbers_are_of_all_rows(pairs: Path, llama: Path, tmp_path: Path) -> None:
    """A run that reads few rows stores the numbers of all, so the next run with this model and data has them."""
    settings = [
        *LLAMA,
        "objective.reference=precomputed",
        "trainer.max_steps=2",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    few = dpo(pairs, llama, tmp_path / "few", *settings, "trainer.overfit_batches=1")
    assert few.code == 0, few.err
    assert logged(tmp_path / "few")[0][0]["train/rewards/margin"] == pytest.approx(0, abs=1e-4)
    again = dpo(pairs, llama, tmp_path / "all", *settings)
    assert again.code == 0, again.err
    assert "reference log-probabilities" not in again.err


EPOCH = ["trainer.max_steps=null", "trainer.max_epochs=1"]


@pytest.mark.parametrize(
    ("argv", "read"),
    [
        ([], None),
        (EPOCH, None),
        (["trainer.max_steps=4"], None),
        (["trainer.max_steps=3"], 32),
        (["trainer.limit_val_batches=1", *EPOCH], 36),
        (["trainer.limit_val_batches=1", "trainer.val_check_interval=2", *EPOCH], None),
        (["trainer.overfit_batches=1", *EPOCH], 16),
    ],
)
def test_a_pass_over_all_pairs_pays_where_the_run_reads_as_many(argv: list[str], read: int | None) -> None:
    corpus: Any = SimpleNamespace(train=range(32), val=range(8))
    words = "" if read is None else f"the run reads {read} pairs, fewer than the 40 there are"
    assert with_reference.why_online_is_less(check(compose([*DPO_RUN, *argv])), corpus) == words


def test_auto_precomputes_where_that_pays(pairs: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*argv: str) -> str:
        objective = built(pairs, llama, *LLAMA, *argv)[2]
        made = {"precomputed": objective.precomputed, "frozen_copy": objective.frozen_copy}
        assert [name for name, reference in made.items() if reference is not None] == [objective.reference]
        return dict(objective.plan_rows())["loss"].partition("reference: ")[2]

    assert chosen() == "precomputed (one pass over the pairs before training, no copy of the weights)"
    assert chosen("trainer.max_steps=3") == "frozen_copy (the run reads 32 pairs, fewer than the 40 there are)"
    assert chosen(f"data.val_sets={{more: {{path: {pairs}}}}}").startswith("frozen_copy (those of data.val_sets")
    two_ranks = SimpleNamespace(size=lambda: 2, from_first=lambda make: make())
    monkeypatch.setattr(with_reference, "world", two_ranks)
    assert chosen().startswith("precomputed")
    assert chosen("trainer.strategy=fsdp", "trainer.devices=2").startswith("frozen_copy (fsdp shares out a model")


def test_auto_stays_what_it_was_when_the_run_began(pairs: Path, llama: Path, tmp_path: Path) -> None:
    """A longer run would precompute, which rounds differently; the resumed run equals the frozen copy's bit for bit."""
    few = [*LLAMA, "run.resume=auto", "trainer.val_check_interval=3", "trainer.save_every_n_steps=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert dpo(pairs, llama, whole, *few, "objective.reference=frozen_copy", "trainer.max_steps=6").code == 0
    assert dpo(pairs, llama, cut, *few, "trainer.max_steps=3").code == 0
    ended = dpo(pairs, llama, cut, *few, "trainer.max_steps=6")
    assert ended.code == 0, ended.err
    assert "reference: frozen_copy (as the run began)" in ended.out
    assert "reference log-probabilities" not in ended.err
    assert logged(cut) == logged(whole)

    _, _, objective = built(pairs, llama, *LLAMA)
    objective.continue_from({})  # a checkpoint of an earlier version
    assert (objective.reference, objective.precomputed) == ("frozen_copy", None)
    objective.continue_from({"reference": "precomputed"})
    assert objective.reference == "precomputed"
    _, _, objective = built(pairs, llama, *LLAMA, "objective.reference=precomputed")
    objective.continue_from({"reference": "frozen_copy"})  # set explicitly now, so it may change
    assert objective.reference == "precomputed"


def test_the_check_says_what_differs(pairs: Path, llama: Path) -> None:
    class Trainer:
        precision = "32-true"

    _, corpus, objective = built(pairs, llama, *LORA, "objective.reference=frozen_copy")
    objective._trainer = Trainer()  # type: ignore[assignment]
    batch = batch_of(corpus, 0, 1)
    check_start(objective, batch)
    name, weight = next((n, p) for n, p in objective.model.named_parameters() if ".lora_B." in n)
    with torch.no_grad():
        weight += 0.1
    with pytest.raises(RunError, match=f"chosen answer of pair 1 .*{name}"):
        check_start(objective, batch)
    objective.reference, objective.frozen_copy = "adapter_off", None
    with pytest.raises(RunError, match=r"objective\.reference=frozen_copy"):
        check_start(objective, batch)


def test_references_that_do_not_fit_are_refused(pairs: Path, llama: Path) -> None:
    cases = [
        (LLAMA, "objective.reference=adapter_off", "no adapter is trained"),
        ([*LLAMA, "objective.loss=ipo"], "objective.reference=none", "there are the losses sigmoid, simpo and orpo"),
        ([*LLAMA, "objective.loss=simpo"], "objective.reference=frozen_copy", "have no reference"),
        ([*LORA, "peft.init_weights=pissa"], "objective.reference=adapter_off", "taken out of the base"),
        ([*LORA, "peft.bias=all"], "objective.reference=adapter_off", "trains biases of the base"),
    ]
    for argv, override, reason in cases:
        with pytest.raises(UserError, match=reason):
            built(pairs, llama, *argv, override)
    free = [*LLAMA, "objective.reference=none"]
    assert [built(pairs, llama, *argv)[2].reference for argv in (LLAMA, LORA, [*LORA, "peft.bias=all"], free)] == [
        "precomputed",
        "adapter_off",
        "frozen_copy",
        "none",
    ]
    assert Choice.__doc__ is not None
    assert all(name in Choice.__doc__ or name == "auto" for name in REFERENCES)


def test_wrong_settings_are_refused() -> None:
    for override, reason in [
        ("objective.loss=sigmod", "did you mean sigmoid"),
        ("objective.reference=copy", "objective.reference=copy is not known"),
        ("objective.beta=0", "objective.beta=0"),
        ("objective.label_smoothing=0.5", "below 0.5"),
        ("objective.length_normalize=maybe", "length_normalize"),
        ("data.on_too_long=split", "data.on_too_long=split"),
        ("data.on_too_long=cut", "data.on_too_long=cut is not known"),
        ("data.packing=greedy", "data.packing=greedy"),
        ("data.train_on=all", "data.train_on=all"),
    ]:
        with pytest.raises(UserError, match=reason):
            check(compose([*DPO_RUN, override]))


def test_frozen_copies_come_and_go() -> None:
    layer = torch.nn.Linear(2, 2)
    first = layer.weight.detach().clone()
    frozen = FrozenCopy(layer)
    with torch.no_grad():
        layer.weight += 1
    trained = layer.weight.detach().clone()
    loss = layer(torch.ones(1, 2)).sum()
    with frozen.in_place():
        assert torch.equal(layer.weight, first)
    assert torch.equal(layer.weight, trained)
    assert frozen.changed() == ["weight"]
    loss.backward()  # the copy was swapped in between forward and backward
    assert layer.weight.grad is not None


def test_a_copy_holds_under_an_autocast_that_keeps_its_casts() -> None:
    """Holds even for a custom precision plugin: the cache identifies a weight by its tensor, not by its values."""
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    frozen = FrozenCopy(layer)
    with torch.no_grad():
        layer.weight += 1
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        trained = layer(x)
        with frozen.in_place():
            first = layer(x)
        again = layer(x)
    assert torch.equal(again, trained)
    torch.testing.assert_close(trained - first, torch.full((1, 2), 2.0).bfloat16(), rtol=0.02, atol=0)


def test_kl_is_zero_where_both_agree_and_never_negative() -> None:
    ratio = torch.tensor([[0.0, 0.0], [1.0, -1.0], [-3.0, 2.0]])
    kl = kl_per_token(ratio, torch.full((3, 2), 2))
    assert kl[0] == 0
    assert (kl[1:] > 0).all()
    expected = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.5) - 1 - 0.5) / 2
    assert kl[1].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", thinned(["lora_dropout", "full_copy", "full_precomputed", "pissa"], 4))
def test_a_resumed_run_is_the_same_run(name: str, pairs: Path, llama: Path, tmp_path: Path) -> None:
    argv = [
        *STARTS[name],
        "trainer.save_every_n_steps=3",
        "checkpoint.keep_last=9",
        "run.resume=auto",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert dpo(pairs, llama, whole, *argv).code == 0
    assert dpo(pairs, llama, cut, *argv).code == 0
    for checkpoint in store.scan(cut / "checkpoints"):
        if store.step_of(checkpoint) > 3:
            shutil.rmtree(checkpoint)
    (cut / "summary.json").unlink()
    for folder in (tmp_path / "cache").glob("reference-*"):  # as on another machine, to be computed again
        shutil.rmtree(folder)
    ended = dpo(pairs, llama, cut, *argv)
    assert ended.code == 0, ended.err
    assert "continues after step 3" in " ".join(ended.out.replace("│", " ").split())
    assert logged(cut) == logged(whole)
    a, b = (store.load(store.scan(folder / "checkpoints")[-1])["state_dict"] for folder in (cut, whole))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_an_interrupted_reference_goes_on(
    pairs: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure in the third of four parts, the first two aren't computed again and the numbers are the same."""
    monkeypatch.setattr(store_cache, "PART", 8)
    settings = [*LLAMA, "objective.reference=precomputed", "trainer.max_steps=1"]
    assert dpo(pairs, llama, tmp_path / "whole", *settings, f"data.cache_dir={tmp_path / 'whole_cache'}").code == 0
    compute, asked = DPO._reference_of, list[int]()

    def interrupted(self: DPO, rows: Any, chosen: np.ndarray) -> np.ndarray:
        asked.append(len(chosen))
        if len(asked) == 3:
            raise RunError("out of memory")
        return compute(self, rows, chosen)

    monkeypatch.setattr(DPO, "_reference_of", interrupted)
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    assert dpo(pairs, llama, tmp_path / "cut", *settings, cache).code == 1
    assert not list((tmp_path / "cache").glob("reference-*[!s]"))
    ended = dpo(pairs, llama, tmp_path / "again", *settings, cache)
    assert ended.code == 0, ended.err
    assert asked == [8, 8, 8, 8, 8, 8], "three begun, then the third, the fourth and those of validation"
    assert "reference of train pairs: 32 of 32" in ended.err
    (folder,), (whole,) = ((tmp_path / name).glob("reference-*") for name in ("cache", "whole_cache"))
    for split in ("train.npy", "val.npy"):
        assert np.array_equal(np.load(folder / split), np.load(whole / split))


def test_the_reference_is_in_no_checkpoint_and_no_optimizer(pairs: Path, llama: Path, tmp_path: Path) -> None:
    assert dpo(pairs, llama, tmp_path / "run", *LLAMA, "trainer.max_steps=1").code == 0
    saved = store.load(store.scan(tmp_path / "run" / "checkpoints")[-1])
    _, _, objective = built(pairs, llama, *LLAMA)
    names = {f"model.{name}" for name in objective.model.state_dict()}
    assert set(saved["state_dict"]) == names
    trained = sum(p.numel() for p in objective.model.parameters())
    assert sum(p.numel() for p in objective.parameters()) == trained
    assert sum(p.numel() for g in objective.configure_optimizers().param_groups for p in g["params"]) == trained
    state = saved["optimizer_states"][0]["state"]
    assert sum(s["exp_avg"].numel() for s in state.values()) == trained


def test_another_start_on_resume_is_refused(pairs: Path, llama: Path, tmp_path: Path) -> None:
    """The reference is rebuilt on resume; from another model's weights it would be silently wrong."""
    model = shutil.copytree(llama, tmp_path / "model")
    argv = [*LLAMA, "run.resume=auto", "trainer.save_every_n_steps=2"]
    assert dpo(pairs, model, tmp_path / "run", *argv, "trainer.max_steps=2").code == 0
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    save_file({k: v + 0.01 for k, v in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    ended = dpo(pairs, model, tmp_path / "run", *argv, "trainer.max_steps=4")
    assert ended.code == 2
    assert "reference (then" in message(ended.err)


def test_bad_pairs_are_counted_and_long_ones_dropped(pairs: Path, llama: Path, tmp_path: Path) -> None:
    good = [json.loads(line) for line in pairs.read_text().splitlines()[:8]]
    same = {**good[0], "rejected": good[0]["chosen"]}
    long = {**good[0], "chosen": [{"role": "assistant", "content": "x" * 400}]}
    path = write_chats(tmp_path / "pairs.jsonl", [*good, same, long])
    settings = [*LLAMA, "data.val_fraction=0", "trainer.max_steps=1", f"data.path={path}"]
    ended = dpo(path, llama, tmp_path / "refused", *settings)
    assert ended.code == 2
    assert f"{path}, line 9: chosen and rejected are the same" in message(ended.err)
    ended = dpo(path, llama, tmp_path / "run", *settings, "data.on_bad_row=skip")
    assert ended.code == 0, ended.err
    told = " ".join(ended.out.replace("│", " ").split())
    assert "10 rows -> 16 examples" in told
    assert "1 too long and dropped, 1 bad rows skipped" in told
    assert f"1 row skipped, first {path}, line 9: chosen and rejected are the same" in told


def test_the_last_short_step_and_empty_micro_batches(pairs: Path, llama: Path) -> None:
    config, corpus, objective = built(pairs, llama, *LLAMA, "objective.reference=frozen_copy")
    datamodule = build_datamodule(config, corpus, 4)
    assert len(datamodule.train_rows) == 32
    empty = corpus.train.empty()
    parts = objective.micro_batch_loss(empty)
    assert parts.loss_sum.item() == 0
    assert int(parts.n_tokens) == int(objective.count_seen(empty)) == 0
    assert all(float(value) == 0 for value in parts.sums.values())
    parts.loss_sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in objective.model.parameters())
