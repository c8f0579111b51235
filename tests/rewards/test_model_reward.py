"""The score of a reward model equals transformers' own on each conversation alone, whatever the batch."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lmtrain.errors import UserError
from lmtrain.rewards.model import ModelReward, asked
from tiny_pretrained import save_pretrained

TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    folder, base = tmp_path / "judge", save_pretrained(tmp_path / "base", max_position_embeddings=96)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def alone(folder: Path, text: str) -> float:
    """Returns transformers' score of one text; it reads the last token that is not padding, here the end of text."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = tokenizer.eos_token_id
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits.item()


@pytest.mark.parametrize("batch_size", [1, 2, 16])
@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_each_score_is_the_models(template: str | None, batch_size: int, judge: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = template
    (judge / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(judge)
    prompts, answers = ["How many?", "Why", "Say something longer, please."], ["3", "Because of the rain.", "no"]
    reward = ModelReward(str(judge), batch_size)
    reward.place(torch.device("cpu"))
    found = reward(prompts, answers)
    end = tokenizer.eos_token or ""
    texts = [
        f"{p}{a}{end}" if template is None else f"<user>{p}\n<assistant>{a}\n"
        for p, a in zip(prompts, answers, strict=True)
    ]
    assert found == pytest.approx([alone(judge, text) for text in texts], abs=1e-5)
    assert len(set(found)) == 3
    assert not any(p.requires_grad for p in reward.model.parameters())
    with pytest.raises(ValueError, match="and the reward model 96 positions"):
        reward(["x"], ["y" * 200])
    room = 96 - len(reward._ids("x", ""))
    assert len(reward._ids("x", "y" * room)) == 96, "all positions may be used"


def test_a_text_without_a_template_ends_as_texts_do_and_mistakes_keep_their_words(
    judge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (judge / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    assert ModelReward(str(judge))._ids("ab", "c") == [*tokenizer("abc")["input_ids"], tokenizer.eos_token_id]

    def fails(*_: object) -> None:
        raise UserError("its own words")

    monkeypatch.setattr("lmtrain.rewards.model._load", fails)
    with pytest.raises(UserError, match=r"^its own words$"):
        ModelReward(str(judge))


def test_the_content_of_a_reward_model_is_its_weights(judge: Path) -> None:
    first = ModelReward(str(judge)).content()
    assert ModelReward(str(judge)).content() == first
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    model.score.weight.data += 1
    model.save_pretrained(judge)
    assert ModelReward(str(judge)).content() != first


def test_what_a_completion_answers() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [(t["role"], t["content"]) for t in asked([*turns, turns[0]])] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "a"),
    ]
    assert [t["content"] for t in asked([*turns, turns[1]])] == ["a"], "answers at its end are no part of the prompt"
    assert [(t["role"], t["content"]) for t in asked("a")] == [("user", "a")]
    with pytest.raises(ValueError):
        asked([{"role": "user"}])


def test_other_heads_and_names_are_refused(judge: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set reward\.name_or_path"):
        ModelReward(None)
    two = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=2, ignore_mismatched_sizes=True)
    two.save_pretrained(judge)
    with pytest.raises(UserError, match="has no scalar head"):
        ModelReward(str(judge))
    with pytest.raises(UserError, match="has no scalar head"):
        ModelReward(str(tmp_path / "base"))
