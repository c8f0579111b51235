"""Rotary embeddings that depend on a sequence's length: each document has what transformers gives it alone."""

import copy
from pathlib import Path

import pytest
import torch
from test_families import Answers, answer_log_probs, documents, lmtrain_model, padded, reference, reference_log_probs
from transformers import AutoModelForCausalLM

from chats import write_chats
from family_variants import Variant, config_of
from helpers_models import packed
from inprocess import message, run
from lmtrain.data.examples.pair_rows import PairRows
from lmtrain.models import rotary
from lmtrain.models.probe import enlarge
from support import rows
from tiny_pretrained import SHORT, save_pretrained

LONGEST = 8  # of the documents of `packed`, some are longer and some are not
WIDTHS = {"minicpm3": 4}
FAMILIES = ["phi3", "llama", "phimoe", "minicpm3"]


def model_of(family: str):
    width = WIDTHS.get(family, 8)
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": LONGEST,
        "short_factor": [1.0] * (width // 2), "long_factor": [3.0, 5.0, 7.0, 9.0][: width // 2],
        "short_mscale": 1.1, "long_mscale": 1.4,
    }  # fmt: skip
    config = config_of(Variant(family, {}))
    own = {"original_max_position_embeddings": LONGEST} if family in ("phi3", "phimoe") else {}
    config = type(config).from_dict(config.to_dict() | {"rope_parameters": rope} | own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        enlarge(model)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_the_loss_it_has_alone(family: str) -> None:
    """In packed rows, padded rows and pairs with and without shared prompts; the lengths change the loss by 1e-3."""
    model = model_of(family)
    theirs, ours, batch = copy.deepcopy(model), lmtrain_model(model), packed()
    alone = documents(batch)
    assert min(map(len, alone)) <= LONGEST < max(map(len, alone))
    expected, answers = reference(theirs, alone).item(), Answers()
    assert ours(**batch).nll_sum.item() == pytest.approx(expected, rel=1e-6)
    lengths = torch.tensor([len(ids) for ids in alone])
    assert ours(**padded(alone), row_lengths=lengths).nll_sum.item() == pytest.approx(expected, rel=1e-6)
    assert ours(**padded(alone)).nll_sum.item() != pytest.approx(expected, rel=1e-4)  # as transformers pads them
    pairs = PairRows(answers, share_prompts=False)
    for lay_out in (lambda: None, pairs.pad):
        lay_out()
        found = answer_log_probs(ours, pairs)
        torch.testing.assert_close(found, reference_log_probs(theirs, answers), rtol=1e-6, atol=0)
    assert ours.lengths.tokens is None


def test_the_limit() -> None:
    assert rotary.limit(model_of("llama")) == LONGEST
    assert rotary.limit(AutoModelForCausalLM.from_config(config_of(Variant("llama", {})))) is None


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 60,
            "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}  # fmt: skip
    return save_pretrained(tmp_path_factory.mktemp("base"), max_position_embeddings=256, rope_parameters=rope)


def losses(base: Path, folder: Path, *argv: str) -> list[dict[str, float]]:
    """Returns the metrics of two steps on rows of 40 to 110 tokens."""
    ended = run("train", *SHORT, f"model.name_or_path={base}", "trainer.max_steps=2", "data.chat_template=zephyr",
                "data.seq_len=128", "data.val_fraction=0", "trainer.val_check_interval=null", f"run.dir={folder}",
                *argv)  # fmt: skip
    assert ended.code == 0, ended.err
    return [{k: v for k, v in row.items() if k.startswith("train/")} for row in rows(folder / "metrics.jsonl")]


def test_micro_batches_of_any_size_give_one_loss(base: Path, tmp_path: Path) -> None:
    lengths = [i * 7 % 60 + 1 for i in range(12)]
    turns = [
        {"messages": [{"role": "user", "content": "?" * n}, {"role": "assistant", "content": f"{n}"}]} for n in lengths
    ]
    data = ["objective=sft", "data=chat_jsonl", f"data.path={write_chats(tmp_path / 'chats.jsonl', turns)}"]
    found = [
        losses(base, tmp_path / str(size), *data, "data.packing=off", f"data.micro_batch_size={size}")
        for size in (1, 4)
    ]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


def test_answers_of_different_lengths_share_no_prompt(base: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}?", "chosen": "!" * (i * 7 % 60 + 1), "rejected": f"no{i}"} for i in range(12)]
    data = ["objective=dpo", "data=preference_jsonl", f"data.path={write_chats(tmp_path / 'pairs.jsonl', pairs)}"]
    found = [losses(base, tmp_path / share, *data, f"data.share_prompts={share}") for share in ("true", "false")]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert "see the prompt of their own" in (tmp_path / "true" / "plan.txt").read_text()


def test_sampling_beyond_the_limit_is_refused(base: Path, tmp_path: Path) -> None:
    prompts = write_chats(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}"} for i in range(20)])
    ended = run("train", *SHORT, f"model.name_or_path={base}", "objective=grpo", "data=prompts_jsonl",
                f"data.path={prompts}", "reward=regex", "reward.pattern=a", "data.seq_len=128",
                "objective.max_new_tokens=40", "data.chat_template=zephyr", f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 2
    assert "the model's 60 positions" in message(ended.err)
