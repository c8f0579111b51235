"""router.over_layers=auto is joint for a loaded mixture; a resumed run keeps the form it began with; KTO's numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from inprocess import run
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.schema import RouterConfig
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.pair_rows import lay_answers, pad_answers
from lmtrain.data.examples.rows import PackedRows, pack, padded
from lmtrain.data.store.bins import open_shards
from lmtrain.data.store.writer import BinWriter
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.probe import set_attention
from lmtrain.objectives.parts import inputs_of
from lmtrain.rollouts.rollout import after_prompt
from support import rows
from tiny_pretrained import SHORT, save_pretrained


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a tiny mixture of experts whose load-balancing loss has a large coefficient."""
    folder = save_pretrained(tmp_path_factory.mktemp("mixture"))  # for its tokenizer
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=AutoModelForCausalLM.from_pretrained(folder).config.vocab_size, hidden_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, max_position_embeddings=256, router_aux_loss_coef=0.5, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_resumed_run_keeps_the_form_it_began_with(mixture: Path, corpus: Path, tmp_path: Path) -> None:
    def trained(name: str, *argv: str) -> list[dict[str, Any]]:
        fixed = [f"model.name_or_path={mixture}", f"data.path={corpus}", f"run.dir={tmp_path / name}"]
        ended = run("train", *SHORT, *fixed, "export.enabled=false", "callbacks.samples.every_n_validations=0",
                    "schedule=constant", "run.resume=auto", *argv)  # fmt: skip
        assert ended.code == 0, ended.err
        return [without_times(row) for row in rows(tmp_path / name / "metrics.jsonl")]

    summed = ["router.over_layers=sum"]  # as in all runs from before the option existed
    whole = trained("whole", *summed)
    trained("cut", *summed, "trainer.max_steps=2")
    assert trained("cut") == whole
    own = trained("own")
    assert own == trained("joint", "router.over_layers=joint")
    assert own[-1] != whole[-1]


def test_the_router_losses_of_a_kto_validation_can_be_monitored(mixture: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    found = [{"prompt": f"{i}", "completion": f" {i % 3}", "label": i % 2 == 0} for i in range(10)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in found))
    ended = run("train", *SHORT, "objective=kto", "data=unpaired_jsonl", f"data.path={answers}",
                "data.val_fraction=0.2", f"model.name_or_path={mixture}", f"run.dir={tmp_path / 'run'}",
                "callbacks.samples.every_n_validations=0", "checkpoint.monitor=val/router/load_balance",
                "export.enabled=false", "data.chat_template=zephyr", "data.seq_len=128", "trainer.max_steps=1",
                "trainer.val_check_interval=1")  # fmt: skip
    assert ended.code == 0, ended.err
    assert any("val/router/load_balance" in row for row in rows(tmp_path / "run" / "metrics.jsonl"))


def of_loaded() -> RouterConfig:
    """Returns the settings with which the router loss is that of a loaded model."""
    return RouterConfig(load_balance=None, deviation=0.0, z_loss=0.0, over_layers="joint", scope="micro_batch",
                        warn_after_steps=None)  # fmt: skip


def test_a_shared_prompt_counts_once_per_completion(mixture: Path) -> None:
    """As in transformers, where each completion is a row with its prompt; TRL adds this loss to GRPO's and DPO's."""
    model = AutoModelForCausalLM.from_pretrained(mixture)
    set_attention("auto", model, 64)
    ours = LanguageModel(model, of_loaded())
    prompt, completions = list(range(5, 25)), [[30, 31, 32], [40, 41], [50, 51, 52, 53, 54]]
    answers = [after_prompt(prompt, completion) for completion in completions]
    found = []
    for prefixes in ([0, 20, 20], None):
        batch = lay_answers(answers, prefixes)
        out = ours.log_probs(inputs_of(batch), scored=batch["scored"], before=batch["before"])
        found.append((out.router_loss, *out.aux.values()))
    torch.testing.assert_close(*found)
    logits = [model(torch.tensor([[*prompt, *c]]), output_router_logits=True).router_logits for c in completions]
    theirs = load_balancing_loss_func(tuple(map(torch.cat, zip(*logits, strict=True))), 4, 2)
    torch.testing.assert_close(found[0][0], 0.5 * theirs)


def laid(layout: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Returns a micro-batch with padding, and its examples: padded rows of SFT, of DPO's answers, or a packed row."""
    examples = [list(range(5, 25)), list(range(30, 37)), [40, 41, 42], list(range(60, 75))]
    answers = [(np.array(ids), np.arange(len(ids)) > 0) for ids in examples]
    if layout == "padded":
        return padded(answers, 8), examples
    if layout == "answers":
        batch = lay_answers(answers)
        pad_answers(batch)
        return batch, examples
    with BinWriter(folder, "train", "uint16", 1000, masked=True) as writer:
        for ids, trained in answers:
            writer.append(ids, trained, ends_document=True)
        read = Examples(open_shards(folder, "uint16", writer.close()))
    rows = PackedRows(read, pack(read.lengths, 32, "greedy", None), isolate_documents=True)
    return rows.read(np.array([[0, 0], [0, 1]])), examples


@pytest.mark.parametrize("layout", ["padded", "answers", "packed"])
def test_padding_is_no_token_of_the_routers(layout: str, mixture: Path, tmp_path: Path) -> None:
    """As in transformers, given the attention mask: the loss and what it adds to the gradients are equal."""
    batch, examples = laid(layout, tmp_path)
    theirs, model = (AutoModelForCausalLM.from_pretrained(mixture) for _ in range(2))
    width = max(map(len, examples))
    ids, mask = torch.zeros(len(examples), width, dtype=torch.int64), torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        ids[row, : len(example)], mask[row, : len(example)] = torch.tensor(example), 1
    logits = theirs(ids, attention_mask=mask, output_router_logits=True).router_logits
    expected = 0.5 * load_balancing_loss_func(logits, 4, 2, mask)
    without = 0.5 * load_balancing_loss_func(logits, 4, 2)
    assert abs(expected - without) > 1e-3, "padding would show"
    expected.backward()
    set_attention("auto", model, 64)
    ours = LanguageModel(model, of_loaded())
    _, found = ours.hidden_states(inputs_of(batch))
    loss, _ = ours.router_losses(found)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    gradients = dict(model.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name].grad, parameter.grad, msg=lambda m, name=name: f"{name}: {m}")
    counted = sum(map(len, examples)) * 2  # two choices of each token
    assert ours.router_losses.chosen["router"].sum(1).tolist() == [counted] * 3
