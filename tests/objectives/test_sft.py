"""Supervised fine-tuning end to end: what is learned for every packing and batch split, and bad rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chats import conversation, write_chats
from inprocess import TWO_STEPS, Ended, message, run
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.data.text.windows import IGNORE
from lmtrain.models.build import build_model
from lmtrain.models.documents import Inputs
from lmtrain.models.language_model import LanguageModel
from lmtrain.run.build import build_datamodule
from support import TINY, rows

CHAT = [*TINY, "objective=sft", "data=chat_jsonl", "data.chat_template=vicuna", "model.max_position_embeddings=1024",
        "data.seq_len=512", "data.val_fraction=0.1", "callbacks.samples.every_n_validations=0",
        "export.enabled=false"]  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def sft(chats: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *CHAT, *TWO_STEPS, f"data.path={chats}", f"run.dir={run_dir}", *argv)


def typed(chats: Path, *argv: str) -> Any:
    config = check(compose([*CHAT, f"data.path={chats}", *argv]))
    config.trainer.accelerator = "cpu"
    return config


def tiny_model(config: Any, tokenizer: Any) -> LanguageModel:
    torch.manual_seed(0)
    hf_model = build_model(config.model, len(tokenizer), tokenizer.eos_token_id, config.data.seq_len)
    return LanguageModel(hf_model)


def whole_gradient(model: LanguageModel, corpus: Any) -> tuple[float, int, list[torch.Tensor]]:
    """Returns the summed loss, the learned tokens and the gradient of all training rows, read one at a time."""
    model.zero_grad()
    loss, n_tokens = 0.0, 0
    for r in range(len(corpus.train)):
        batch = corpus.train.read(np.array([[0, r]]))
        batch.pop("seen")
        out = model(**batch)
        out.loss_sum.backward()
        loss, n_tokens = loss + out.loss_sum.item(), n_tokens + int(out.n_tokens)
    return loss, n_tokens, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("attention", ["slices", "dense_mask"])
@pytest.mark.parametrize("packing", ["greedy", "first_fit", "best_fit_decreasing"])
def test_packed_examples_train_as_if_each_were_alone(chats: Path, packing: str, attention: str) -> None:
    config = typed(chats, "data.packing=off", f"model.attention={attention}")
    padded = build_corpus(config)
    model = tiny_model(config, padded.tokenizer)
    alone = whole_gradient(model, padded)
    packed = build_corpus(typed(chats, f"data.packing={packing}", "data.seq_len=1024"))
    assert len(packed.train) < len(padded.train) / 1.5
    together = whole_gradient(model, packed)
    assert together[1] == alone[1]
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    for a, b in zip(alone[2], together[2], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * a.abs().max().item())


@pytest.mark.parametrize("attention", ["slices", "dense_mask"])
def test_a_token_of_one_example_reaches_no_other(chats: Path, attention: str) -> None:
    """Changing its tokens changes no hidden state of the others, and its loss has no gradient for their inputs."""
    config = typed(chats, "data.packing=first_fit", f"model.attention={attention}")
    corpus = build_corpus(config)
    model = tiny_model(config, corpus.tokenizer).eval()
    batch = corpus.train.read(np.array([[0, 0], [0, 1]]))
    borders = batch["cu_seqlens"].tolist()
    start, stop = borders[1], borders[2]  # the second example of the first row
    inside = torch.zeros(batch["input_ids"].numel(), dtype=torch.bool)
    inside[start:stop] = True

    def hidden(ids: torch.Tensor) -> torch.Tensor:
        return model.hidden_states(Inputs(ids, batch["position_ids"], batch["cu_seqlens"]))[0].flatten(0, 1)

    changed = batch["input_ids"].clone()
    changed.view(-1)[start:stop] = (changed.view(-1)[start:stop] + 1) % 256
    before, after = hidden(batch["input_ids"]), hidden(changed)
    assert (before - after)[~inside].abs().max() <= 1e-6
    assert (before - after)[inside].abs().min(dim=0).values.max() > 1e-3  # the change is large enough to show

    seen: list[torch.Tensor] = []
    embeddings = model.model.get_input_embeddings()

    def keep(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(out.detach().requires_grad_())
        return seen[0]

    hook = embeddings.register_forward_hook(keep)
    hidden(batch["input_ids"])[inside].square().sum().backward()
    hook.remove()
    gradient = seen[0].grad.flatten(0, 1).abs().sum(-1)
    assert gradient[~inside].max() == 0
    assert gradient[inside].min() > 0


@pytest.mark.parametrize("packing", ["off", "first_fit"])
def test_batch_splits_change_nothing(chats: Path, tmp_path: Path, packing: str) -> None:
    logged = []
    for micro in (8, 2, 1):
        batch = ["data.global_batch_size=8", f"data.micro_batch_size={micro}", f"data.packing={packing}"]
        ended = sft(chats, tmp_path / str(micro), *batch, "data.seq_len=256", "trainer.limit_val_batches=null")
        assert ended.code == 0, ended.err
        logged.append(rows(tmp_path / str(micro) / "metrics.jsonl"))
    for other in logged[1:]:
        for a, b in zip(logged[0], other, strict=True):
            assert a["tokens_seen"] == b["tokens_seen"]
            for key in ("train/loss", "grad_norm", "val/loss"):
                if key in a:
                    assert b[key] == pytest.approx(a[key], rel=1e-5), key


def test_validation_loss_is_the_token_mean_of_its_rows(chats: Path, tmp_path: Path) -> None:
    """It equals torch's own cross-entropy over transformers' logits, with each row alone."""
    ended = sft(chats, tmp_path / "run", "optimizer.lr=0.0", "trainer.max_steps=1", "trainer.limit_val_batches=null")
    assert ended.code == 0, ended.err
    config = typed(chats, "data.packing=off")
    corpus = build_corpus(config)
    from lightning.pytorch import seed_everything

    seed_everything(config.seed, verbose=False)
    model = build_model(config.model, len(corpus.tokenizer), corpus.tokenizer.eos_token_id, 512).eval()
    total, count = 0.0, 0
    for r in range(len(corpus.val)):
        batch = corpus.val.read(np.array([[0, r]]))
        logits = model(batch["input_ids"]).logits
        total += F.cross_entropy(logits[0], batch["labels"][0], ignore_index=IGNORE, reduction="sum").item()
        count += int((batch["labels"] != IGNORE).sum())
    logged = [r["val/loss"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in r]
    assert logged[-1] == pytest.approx(total / count, rel=1e-5)


GOOD = conversation(1)
U, A = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
BAD = {
    "no_role": {"messages": [{"content": "Hi?"}, A]},
    "unknown_role": {"messages": [{"role": "robot", "content": "Hi?"}, A]},
    "empty": {"messages": [{"role": "user", "content": "  "}, A]},
    "assistant_first": {"messages": [A, U, A]},
    "two_systems": {"messages": [{"role": "system", "content": "Be."}, {"role": "system", "content": "So."}, U, A]},
    "not_text": {"messages": [{"role": "user", "content": 17}, A]},
    "no_answer": {"messages": [U]},
    "no_list": {"messages": "Hi?"},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path: Path, name: str) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [GOOD, BAD[name], GOOD, GOOD])
    ended = sft(path, tmp_path / "refused", "data.val_fraction=0")
    assert ended.code == 2
    assert f"{path}, line 2: " in message(ended.err)
    assert "data.on_bad_row=skip" in message(ended.err)
    ended = sft(path, tmp_path / "run", "data.val_fraction=0", "data.on_bad_row=skip")
    assert ended.code == 0, ended.err
    told = " ".join(ended.out.replace("│", " ").split())
    assert "4 rows -> 3 examples" in told
    assert "1 bad rows skipped" in told


def test_too_few_rows_to_hold_one_out(tmp_path: Path) -> None:
    """With data.val_fraction=0.05, four rows give no validation row, and the run says so."""
    ended = sft(write_chats(tmp_path / "chats.jsonl", 4), tmp_path / "run", "data.val_fraction=0.05")
    assert ended.code == 0, ended.err
    assert "no validation split" in " ".join(ended.out.replace("│", " ").split())


def test_broken_json_and_long_rows(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + '{"messages": [{"role": \n' + json.dumps(GOOD) + "\n")
    ended = sft(path, tmp_path / "refused", "data.val_fraction=0")
    assert f"{path}, line 2: malformed JSON" in message(ended.err)
    assert sft(path, tmp_path / "run", "data.val_fraction=0", "data.on_bad_row=skip").code == 0
    long = write_chats(tmp_path / "long.jsonl", [GOOD, {"messages": [{**U, "content": "x" * 600}, A]}, GOOD])
    ended = sft(long, tmp_path / "long", "data.val_fraction=0", "data.on_too_long=raise")
    assert f"{long}, line 2: " in message(ended.err)
    assert "data.max_length" in message(ended.err)


def test_rows_without_anything_to_learn_are_refused(tmp_path: Path) -> None:
    """After truncation on the right, nothing of the answer is left."""
    rows_ = [GOOD] * 9 + [{"messages": [{**U, "content": "x" * 600}, A]}]
    path = write_chats(tmp_path / "chats.jsonl", rows_)
    ended = sft(path, tmp_path / "run", "data.val_fraction=0", "data.max_length=250")
    assert ended.code == 2
    assert "1 of 10 train rows have no learned token" in message(ended.err)
    assert f"{path}, line 10" in message(ended.err)
    assert sft(path, tmp_path / "run", "data.val_fraction=0", "data.max_length=250", "data.max_untrained=0.2").code == 0


def test_a_mixture_sees_its_parts_by_weight(tmp_path: Path) -> None:
    a, b = write_chats(tmp_path / "a.jsonl", 10), write_chats(tmp_path / "b.jsonl", 8)
    mixture = f"data.mixture=[{{path: {a}, weight: 2}}, {{path: {b}, weight: 0.5}}]"
    chat = [word for word in CHAT if word != "data=chat_jsonl"]
    config = check(compose([*chat, "data=mixture", mixture, "data.val_fraction=0", "data.packing=off"]))
    assert len(build_corpus(config).train) == 24
    wrong = ["data=mixture", "data.mixture=[{path: nowhere.jsonl, wight: 2}]"]
    ended = run("train", *chat, *TWO_STEPS, *wrong, f"run.dir={tmp_path}/run")
    assert "data.mixture[0].wight is not known" in message(ended.err)


def test_rows_are_prepared_without_training(chats: Path) -> None:
    ended = run("prepare", *CHAT, f"data.path={chats}")
    assert ended.code == 0, ended.err
    corpus = build_corpus(typed(chats))
    for line in corpus.words:
        assert line in ended.out
    assert str(corpus.folder) in ended.out


@pytest.mark.parametrize("packing", ["off", "best_fit_decreasing"])
def test_a_mixture_whose_weights_leave_no_validation_row(packing: str, tmp_path: Path) -> None:
    chat = [word for word in CHAT if word != "data=chat_jsonl"]
    mixture = f"data.mixture=[{{path: {write_chats(tmp_path / 'a.jsonl', 10)}, weight: 0.5}}]"
    words = ["data=mixture", mixture, "data.val_fraction=0.1", f"data.packing={packing}"]
    corpus = build_corpus(check(compose([*chat, *words])))
    assert corpus.val is None
    assert "examples in an epoch, by the weights 0.5: train 4, val 0" in corpus.words


def test_steps_of_padded_rows_hold_near_lengths_together(chats: Path) -> None:
    config = typed(chats, "data.packing=off", "data.global_batch_size=12", "data.micro_batch_size=3")
    corpus = build_corpus(config)
    module = build_datamodule(config, corpus, total_steps=3)
    module.setup("fit")
    step = next(iter(module.train_dataloader()))
    widths = [mb["input_ids"].shape[1] for mb in step["micro_batches"]]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_data_and_objective_must_fit(chats: Path, corpus: Path, tmp_path: Path) -> None:
    ended = run("train", *CHAT, f"data.path={chats}", "objective=causal_lm", f"run.dir={tmp_path}/a")
    assert "objective=sft" in message(ended.err)
    ended = run("train", *TINY, "data=text", f"data.path={corpus}", "objective=sft", f"run.dir={tmp_path}/b")
    assert "objective=sft needs conversations" in message(ended.err)


@pytest.mark.parametrize("number", [5, 2, 150])
def test_what_is_said_to_validate_on_does_give_a_validation_split(number: int, tmp_path: Path) -> None:
    """A fraction of one in a hundred of five rows is no row, so the advice has to name a larger one."""
    chats = write_chats(tmp_path / "few.jsonl", number)
    none = build_corpus(typed(chats, "data.val_fraction=0"))
    assert none.val is None
    advice = none.how_to_validate(typed(chats).data)
    [override] = [word for word in advice.split() if word.startswith("data.val_fraction=")]
    assert build_corpus(typed(chats, override)).val is not None


def test_one_row_cannot_be_shared_out(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "one.jsonl", 1)
    advice = build_corpus(typed(chats, "data.val_fraction=0")).how_to_validate(typed(chats).data)
    assert "val_fraction" not in advice
    assert "data.val_path" in advice
