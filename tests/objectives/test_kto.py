"""Unpaired preferences: a step's numbers against the formula, for several splits; tests/parity compares with TRL."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inprocess import Ended, message, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.batch import Stages
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.data.loaders import StepDataset, ValidationDataset
from lmtrain.errors import UserError
from lmtrain.objectives.kto import KTO, Answers
from lmtrain.run.build import build_objective
from support import rows
from tiny_pretrained import save_pretrained

KTO_RUN = [
    "objective=kto", "data=unpaired_jsonl", "data.chat_template=zephyr", "data.val_fraction=0.2", "data.seq_len=256",
    "data.global_batch_size=6", "data.micro_batch_size=6", "schedule=constant", "schedule.warmup_steps=0",
    "trainer.precision=32-true", "trainer.log_every_n_steps=1", "trainer.val_check_interval=3", "trainer.max_epochs=1",
    "trainer.max_steps=null", "callbacks.samples.every_n_validations=0", "logger=none", "export.enabled=false",
    "model=pretrained", "optimizer.lr=3e-3", "optimizer.weight_decay=0", "objective.beta=0.3",
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes twenty answers of different lengths, two thirds desirable; 16 are trained on, so the last step has 4."""
    found = [
        {"prompt": f"{'Well, ' * (i % 4)}what is {i} plus {i}?", "completion": f"It is {2 * i}{'!' * (i % 7)}",
         "label": i % 3 != 0}
        for i in range(20)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


def kto(answers: Path, model: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *KTO_RUN, f"data.path={answers}", f"model.name_or_path={model}", f"run.dir={run_dir}", *argv)


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    return [without_times(row) for row in rows(run_dir / "metrics.jsonl")]


def built(answers: Path, model: Path, *argv: str) -> tuple[Any, KTO]:
    """Builds the corpus, and the objective with weights that have moved away from the reference."""
    config = check(compose([*KTO_RUN, f"data.path={answers}", f"model.name_or_path={model}", *argv]))
    config.trainer.accelerator = "cpu"
    config.trainer.compile = config.trainer.activation_checkpointing = False
    corpus = build_corpus(config)
    objective = build_objective(config, corpus, total_steps=3)
    assert isinstance(objective, KTO)
    objective.on_placed()
    log_probs, _ = objective.answer_log_probs(corpus.train.read(np.array([[0, row] for row in range(16)])))
    log_probs.mean().backward()
    with torch.no_grad():
        for p in objective.model.parameters():
            p += 3e-3 * p.grad.sign()
    objective.zero_grad()
    return corpus, objective


def by_the_formula(objective: KTO, corpus: Any, chosen: list[int]) -> dict[str, torch.Tensor]:
    """Computes a step's loss, z and reward means by equation 8, with each answer alone and transformers' logits."""

    def log_ratio(ids: np.ndarray, scored: np.ndarray) -> torch.Tensor:
        def log_prob() -> torch.Tensor:
            logits = objective.model.model(torch.tensor([ids.tolist()]), use_cache=False).logits[0, :-1].log_softmax(-1)
            targets = torch.tensor(ids[1:].tolist())
            return (logits[torch.arange(len(targets)), targets] * torch.tensor(scored[1:].tolist())).sum()

        assert objective.frozen_copy is not None
        with torch.no_grad(), objective.frozen_copy.in_place():
            before = log_prob()
        return log_prob() - before

    def rotated(prompt: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
        end, start = int(prompt[1].argmax()), int(other[1].argmax())
        return tuple(np.concatenate([a[:end], b[start:]]) for a, b in zip(prompt, other, strict=True))  # type: ignore

    objective.model.model.set_attn_implementation("eager")
    own = [corpus.train.examples.read(row) for row in chosen]
    mismatched = [log_ratio(*rotated(mine, own[i - 1])).detach() for i, mine in enumerate(own)]
    z = torch.stack(mismatched).mean().clamp(min=0)
    ratios = torch.stack([log_ratio(*mine) for mine in own])
    good = torch.tensor([bool(corpus.train.examples.labels[row] == 1) for row in chosen])
    loss = torch.where(good, 1 - torch.sigmoid(0.3 * (ratios - z)), 1 - torch.sigmoid(0.3 * (z - ratios))).mean()
    rewards = 0.3 * ratios.detach()
    margin = rewards[good].mean() - rewards[~good].mean()
    return {"loss": loss, "kl": z, "rewards/margin": margin, "rewards/chosen": rewards[good].mean()}


def test_the_last_turn_of_a_conversation_is_its_answer(answers: Path, llama: Path, tmp_path: Path) -> None:
    """Conversations with a label give the same examples as their prompts, completions and labels in columns."""
    written = [json.loads(line) for line in answers.read_text().splitlines()]
    early = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi. Ask me."}]
    whole, parts, system = [], [], {"role": "system", "content": "Count."}
    for i, row in enumerate(written):
        asked = [*(early if i % 2 else []), {"role": "user", "content": row["prompt"]}]
        answer = {"role": "assistant", "content": row["completion"]}
        own = {"system": "Count."} if i % 3 == 0 else {}
        whole.append({"messages": [*asked, answer], "label": row["label"], **own})
        parts.append({**row, "prompt": [*([system] if own else []), *asked], "completion": [answer]})
    found = []
    for name, some in (("whole", whole), ("parts", parts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        words = [*KTO_RUN, f"data.path={tmp_path / name}.jsonl", f"model.name_or_path={llama}"]
        rows_ = build_corpus(check(compose(words))).train.examples
        examples = [(ids.tolist(), scored.tolist()) for ids, scored in map(rows_.read, range(len(rows_)))]
        found.append((examples, rows_.labels.tolist()))
    assert found[0] == found[1]
    assert 0 < sum(found[0][1]) < len(found[0][1]) == 16
    (tmp_path / "whole.jsonl").write_text(json.dumps({"messages": whole[1]["messages"][:-1], "label": True}))
    with pytest.raises(UserError, match="the conversation ends with a turn from user, not with an answer to label"):
        build_corpus(check(compose([*KTO_RUN, f"data.path={tmp_path / 'whole.jsonl'}", f"model.name_or_path={llama}"])))


@pytest.mark.parametrize("micro", [6, 3, 4, 1])
def test_a_step_is_its_formula_however_it_is_split(micro: int, answers: Path, llama: Path) -> None:
    """Loss, reference point, margin and all gradients are right; z is that of all six answers, even one at a time."""
    corpus, objective = built(answers, llama)
    dataset = StepDataset(corpus.train, seed=3, sizes=Stages.constant(6), micro_batch_size=micro, max_epochs=1, rank=0,
                          world_size=1)  # fmt: skip
    micro_batches = dataset[0]["micro_batches"]
    objective._trainer = type("Trainer", (), {"world_size": 1})()  # type: ignore[assignment]
    objective.look_ahead(micro_batches, torch.tensor(6))
    sums: dict[str, float] = {}
    for batch in micro_batches:
        parts = objective.micro_batch_loss(batch)
        (parts.loss_sum / 6).backward()
        for name, value in parts.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    found = objective.means_of(sums, 6)
    gradients = [p.grad.clone() for p in objective.model.parameters()]
    objective.zero_grad()
    expected = by_the_formula(objective, corpus, dataset.row_ids(0)[:, 1].tolist())
    expected["loss"].backward()
    assert expected["kl"] > 0.05, "the reference point was never needed"
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-4), name
    for ours, theirs in zip(gradients, (p.grad for p in objective.model.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * theirs.abs().max().item())


def test_runs_of_every_split_are_one_run(answers: Path, llama: Path, tmp_path: Path) -> None:
    """Training and validation agree for all splits, down to micro-batches of one, including the short last step."""
    for micro in (6, 2, 1):
        ended = kto(answers, llama, tmp_path / str(micro), f"data.micro_batch_size={micro}",
                    "trainer.limit_val_batches=null")  # fmt: skip
        assert ended.code == 0, ended.err
    expected = numbers(tmp_path / "6")
    assert len([row for row in expected if "train/loss" in row]) == 3
    assert all(any(row.get(f"{part}/kl", 0) > 0.01 for row in expected) for part in ("train", "val"))
    for micro in (2, 1):
        for ours, theirs in zip(numbers(tmp_path / str(micro)), expected, strict=True):
            assert ours.keys() == theirs.keys()
            for key in (k for k in ours if k.startswith(("train/", "val/", "grad"))):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (micro, ours["step"], key)


def test_completions_come_from_the_step_on_every_rank(answers: Path, llama: Path) -> None:
    corpus, _ = built(answers, llama)
    found = corpus.train

    def pairs(rank: int, world_size: int, micro: int, step: int, size: int = 5) -> list[list[int]]:
        dataset = StepDataset(found, seed=3, sizes=Stages.constant(size), micro_batch_size=micro, max_epochs=1,
                              rank=rank, world_size=world_size)  # fmt: skip
        return [pair for share in dataset.shares(step, dataset.row_ids(step)) for pair in share[:, 1:].tolist()]

    order = StepDataset(found, seed=3, sizes=Stages.constant(5), micro_batch_size=5, max_epochs=1, rank=0, world_size=1)
    whole = pairs(0, 1, 5, 0)
    ids = order.row_ids(0)[:, 1].tolist()
    assert whole == [[row, ids[i - 1]] for i, row in enumerate(ids)]
    for micro in (1, 2):
        assert sorted(pairs(0, 2, micro, 0) + pairs(1, 2, micro, 0)) == sorted(whole)
    # With 16 answers, the last step has only one, which takes the completion of the answer before it.
    assert pairs(0, 1, 5, 3) == [[order.row_ids(3)[0, 1], order.row_ids(2)[-1, 1]]]
    shown = ValidationDataset(found, micro_batch_size=3, limit=None, rank=0, world_size=1)
    assert sum(len(shown.share(i)) for i in range(len(shown))) == 16
    assert shown.share(0).tolist() == [[0, 0, 15], [0, 1, 0], [0, 2, 1]]


def test_margins_are_of_what_there_is(answers: Path, llama: Path) -> None:
    """A step whose answers are all of one kind has no margin, rather than half of one."""
    _, objective = built(answers, llama)
    sums = {"loss": 2.0, "logps/mean": -4.0, "rewards/chosen": 6.0, "rewards/rejected": 0.0, "desirable": 4.0}
    assert objective.means_of(sums, 4) == {"loss": 0.5, "logps/mean": -1.0, "rewards/chosen": 1.5}
    both = objective.means_of(sums | {"rewards/rejected": -1.0}, 5)
    assert both["rewards/margin"] == 2.5


def test_a_step_of_one_answer_is_refused(answers: Path) -> None:
    one = ["data.global_batch_size=1", "data.micro_batch_size=1", "model.name_or_path=a"]
    with pytest.raises(UserError, match=r"data\.global_batch_size=1 .*Set it to 2 or more"):
        check(compose([*KTO_RUN, *one]))
    growing = ["data.batch_warmup.start_size=1", "data.batch_warmup.steps=4", *one[1:]]
    with pytest.raises(UserError, match=r"data\.batch_warmup\.start_size=1"):
        check(compose([*KTO_RUN, *growing]))


def test_a_run_begun_before_is_continued(answers: Path, llama: Path, tmp_path: Path) -> None:
    """data.micro_batch_size doesn't change what is learned, so it may change on resume."""
    argv = ["trainer.max_epochs=null", "run.resume=auto", "trainer.save_every_n_steps=1"]
    first = kto(answers, llama, tmp_path / "run", *argv, "trainer.max_steps=1")
    assert first.code == 0, first.err
    again = kto(answers, llama, tmp_path / "run", *argv, "trainer.max_steps=2", "data.micro_batch_size=2")
    assert again.code == 0, message(again.err)


def test_a_prompt_is_no_part_of_the_answer(answers: Path, llama: Path) -> None:
    """The KL estimate takes a row's prompt to end where its answer begins, which data.train_on=all would move to 0."""
    with pytest.raises(UserError, match=r"data\.train_on=all"):
        built(answers, llama, "data.train_on=all")


def test_the_reference_point_of_a_validation_is_never_below_zero(answers: Path, llama: Path) -> None:
    """As in training (equation 7's max with 0): prompts with other answers may be less likely than at the start."""
    _, objective = built(answers, llama)
    objective._trainer = type("Trainer", (), {"world_size": 1})()  # type: ignore[assignment]
    ratios, good = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), torch.tensor([True, False, True])
    for mismatched, z in ((-6.0, 0.0), (6.0, 2.0)):
        found = Answers(ratios, ratios - 3, good, torch.tensor(3))
        objective.validated, objective.val_sums = {0: [(found, torch.tensor(mismatched), {})]}, {}
        means = objective.validation_means()
        sign = torch.where(good, 1.0, -1.0)
        assert means["kl"] == z
        assert means["loss"] == pytest.approx((1 - torch.sigmoid(0.3 * sign * (ratios - z))).mean().item())
