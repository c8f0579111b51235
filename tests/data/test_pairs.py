"""Rows of every format become the same pair; rows that are no pair are refused with a reason; pairs become ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from chats import pair_of
from lmtrain.data import tokenizers
from lmtrain.data.chat.columns import FORMATS, detect
from lmtrain.data.chat.pairs import Pair
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples.pair_rows import PairRowEncoder, fit_pair, lay_answers
from lmtrain.errors import UserError
from loopback_hub import HUB

USER = {"role": "user", "content": "Two plus two?"}
GOOD = {"role": "assistant", "content": "Four."}
WORSE = {"role": "assistant", "content": "Five."}
PAIR = Pair([USER], [GOOD], [WORSE], None, "rows.jsonl, line 3")
TEXTS = {"prompt": "Two plus two?", "chosen": "Four.", "rejected": "Five."}
HH = {
    side: f"\n\nHuman: Two plus two?\n\nAssistant: {text}"
    for side, text in (("chosen", "Four."), ("rejected", "Five."))
}

# (format, row): each row is PAIR
SAME = [
    ("preference", TEXTS),
    ("preference", {"question": "Two plus two?", "chosen": "Four.", "rejected": "Five.", "system": ""}),
    ("preference", {"prompt": [USER], "chosen": [GOOD], "rejected": [WORSE]}),
    ("preference", {"prompt": "Two plus two?", "prompt_id": "1", "chosen": [USER, GOOD], "rejected": [USER, WORSE],
                    "messages": [USER, GOOD]}),  # as in ultrafeedback_binarized
    ("preference", {"conversations": [{"from": "human", "value": "Two plus two?"}],
                    "chosen": {"from": "gpt", "value": "Four."}, "rejected": {"from": "gpt", "value": "Five."}}),
    ("preference", {"instruction": "Two plus two?", "input": "", "chosen": "Four.", "rejected": "Five."}),
    ("preference", {"prompt": "\n\nHuman: Two plus two?\n\nAssistant:", "chosen": "Four.", "rejected": "Five."}),
    ("implicit_prompt", HH),
    ("implicit_prompt", {"chosen": [USER, GOOD], "rejected": [USER, WORSE]}),
]  # fmt: skip


@pytest.mark.parametrize(("format", "row"), SAME)
def test_the_same_pair_in_every_format(format: str, row: dict, data_config) -> None:
    cfg = data_config("preference")
    assert detect("pairs", row, cfg).format.name == format
    assert pair_of(row, cfg, PAIR.where) == PAIR
    written = json.loads(json.dumps(row))
    assert pair_of(written, cfg, PAIR.where) == PAIR


def test_several_turns_and_tools_and_scores(data_config) -> None:
    cfg = data_config("preference", system_prompt="Be brief.")
    shared = [USER, GOOD, {"role": "user", "content": "Sure?"}]
    long = [*shared, {"role": "assistant", "content": "Yes."}, USER, GOOD]
    short = [*shared, {"role": "assistant", "content": "No."}]
    row = {"chosen": long, "rejected": short, "score_chosen": "4.5", "score_rejected": 2, "tools": [{"name": "add"}]}
    pair = pair_of(row, cfg, "here")
    assert pair.prompt == [{"role": "system", "content": "Be brief."}, *shared]
    assert (pair.chosen, pair.rejected) == (long[3:], short[3:])
    assert pair.margin is None  # only a column margin is one
    assert pair.tools == [{"type": "function", "function": {"name": "add"}}]


def test_plain_text_stays_as_it_is(data_config) -> None:
    cfg = data_config("preference", conversation_format="preference_text")
    assert detect("pairs", TEXTS, cfg).format.name == "preference_text"
    assert pair_of(TEXTS, cfg, "here") == Pair(*TEXTS.values(), None, "here")


def test_prompts_made_of_several_columns(data_config) -> None:
    cfg = data_config("preference", prompt_template="{a} plus {b}? {{}}")
    row = {"a": "Two", "b": "two", "chosen": "Four.", "rejected": "Five."}
    pair = pair_of(row, cfg, "here")
    assert pair.prompt == [{"role": "user", "content": "Two plus two? {}"}]
    with pytest.raises(BadRow, match="there is no b "):
        pair_of({k: v for k, v in row.items() if k != "b"}, cfg, "here")


BAD = [
    ({**TEXTS, "rejected": "Four."}, "the same"),
    ({**TEXTS, "chosen": "  "}, "chosen is empty"),
    ({**TEXTS, "rejected": None}, "there is no rejected"),
    ({**TEXTS, "prompt": ""}, "prompt is empty"),
    ({**TEXTS, "chosen": 5}, "chosen must be"),
    ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "the same"),
    ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "Hi"}, GOOD]}, "share no beginning"),
    ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD]}, "rejected ends where the other goes on"),
    ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, {**USER, "content": "Hi"}, GOOD]}, "from user"),
    ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": [WORSE]}, "chosen ends with a turn from user"),
    ({"prompt": [USER], "chosen": [{"role": "poet", "content": "x"}], "rejected": [WORSE]}, "unknown role"),
    ({"prompt": [GOOD], "chosen": [GOOD], "rejected": [WORSE]}, "first turn must be the user's"),
    ({"chosen": "Four.", "rejected": "Five."}, "answer no prompt"),
    ({**HH, "rejected": "\n\nHuman: Two plus two?\n\nAssistant: "}, "rejected, turn 2 is empty"),
    ({**TEXTS, "score_chosen": "good", "score_rejected": 1}, "score_chosen must be a number"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_rows_that_are_no_pair(row: dict, reason: str, data_config) -> None:
    cfg = data_config("preference")
    with pytest.raises(BadRow) as caught:
        pair_of(row, cfg, "rows.jsonl, line 3")
    assert reason in caught.value.reason
    assert str(caught.value).startswith("rows.jsonl, line 3: ")


def test_columns_that_fit_no_format(data_config) -> None:
    with pytest.raises(UserError, match=r"better, worse.*preference \(prompt or.*data.columns"):
        detect("pairs", ["better", "worse"], data_config("preference"))
    with pytest.raises(UserError, match="conversation_format=messages"):
        detect("pairs", ["chosen"], data_config("preference", conversation_format="messages"))
    cfg = data_config("preference", columns={"prompt": "q", "chosen": "better", "rejected": "worse"})
    row = {"q": "Two plus two?", "better": "Four.", "worse": "Five."}
    assert pair_of(row, cfg, PAIR.where) == PAIR


@pytest.fixture
def encoder(tokenizer_config, data_config):
    def make(**settings) -> PairRowEncoder:
        tokenizer = tokenizers.load_or_train(tokenizer_config("bytes"), lambda _: iter(()))
        cfg = data_config("preference", **{"chat_template": "zephyr", "max_length": None, **settings})
        return PairRowEncoder(tokenizer, cfg)

    return make


def scored(example: tuple[list[int], list[bool]]) -> str:
    ids, trained = example
    return bytes(i if i < 256 else ord("$") for i, t in zip(ids, trained, strict=True) if t).decode()


def test_answers_are_scored_up_to_their_end_of_turn(encoder) -> None:
    made = encoder()
    row = {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [WORSE]}
    found = made.encode(row, "here", made.chat.cfg, question=True)
    chosen, rejected = found.examples
    assert (scored(chosen), scored(rejected)) == ("Four.$Four.$", "Five.$")
    assert not chosen[1][0]
    prompt = chosen[1].index(True)
    assert chosen[0][:prompt] == rejected[0][:prompt]
    assert found.question["reference"] == "Four."
    assert found.question["prompt_ids"] == chosen[0][:prompt]
    more = {**row, "chosen": [GOOD, {"role": "assistant", "content": "Yes."}]}
    assert made.encode(more, "here", made.chat.cfg, question=True).question["reference"] == "Four."  # of the first one
    last = encoder(train_on="last_assistant")
    row = {**row, "chosen": [GOOD, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]}
    found = last.encode(row, "here", last.chat.cfg, question=True)
    assert scored(found.examples[0]) == "Yes.$"
    assert (found.question["prompt"], found.question["reference"]) == ("Sure?", "Yes.")  # of the answer that is learned
    row = {**row, "chosen": [GOOD, USER, GOOD]}
    all_after = encoder(train_on="completion")
    text = scored(all_after.encode(row, "here", all_after.chat.cfg, False).examples[0])
    assert text.startswith("Four.$\n<|user|>\nTwo plus two?$\n<|assistant|>\nFour.$")


def test_plain_texts_end_with_the_end_of_text(encoder) -> None:
    made = encoder(conversation_format="preference_text")
    chosen, rejected = made.encode(TEXTS, "here", made.chat.cfg, False).examples
    assert (scored(chosen), scored(rejected)) == ("Four.$", "Five.$")
    assert bytes(chosen[0][: chosen[1].index(True)]).decode() == TEXTS["prompt"]


def test_a_token_that_no_token_predicts_is_not_scored(data_config) -> None:
    vocab = {letter: n for n, letter in enumerate("abcd")} | {"ab": 4}
    tokenizer = tokenizers._wrap(Backend(models.BPE(vocab=vocab, merges=[("a", "b")])))
    row = {"prompt": "a", "chosen": "bd", "rejected": "cd"}  # the prompt and the begin of the chosen answer: one token
    cfg = data_config("preference", conversation_format="preference_text", max_length=None)
    made = PairRowEncoder(tokenizer, cfg)
    chosen, rejected = made.encode(row, "here", made.chat.cfg, False).examples
    assert chosen == ([4, 3, tokenizer.eos_token_id], [False, True, True])
    assert rejected == ([0, 2, 3, tokenizer.eos_token_id], [False, True, True, True])
    for first in (False, True):  # as in data prepared by an earlier version
        answers = [(np.array(ids), np.array([first, *scored[1:]])) for ids, scored in (chosen, rejected)]
        batch = lay_answers(answers, [0, 0])
        assert batch["before"].tolist() == [0, 1, 3, 4, 5]
        assert batch["lengths"].tolist() == [2, 3]


def answers(prompt: int, chosen: int, rejected: int):
    return [(list(range(prompt + n)), [False] * prompt + [True] * n) for n in (chosen, rejected)]


@pytest.mark.parametrize(("policy", "kept"), [
    ("truncate_right", [(0, 10, 4), (0, 8, 2)]),  # first id, length, scored tokens
    ("truncate_left", [(5, 10, 9), (5, 3, 2)]),
])  # fmt: skip
def test_long_pairs_are_cut(policy: str, kept: list, data_config) -> None:
    cfg = data_config("preference", max_length=10, on_too_long=policy)
    found, cut = fit_pair(*answers(6, 9, 2), cfg, "here")
    assert [(ids[0], len(ids), sum(trained)) for ids, trained in found] == kept
    assert cut == 23 - sum(length for _, length, _ in kept)


def test_long_prompts_are_cut_for_both_answers(data_config) -> None:
    cfg = data_config("preference", max_prompt_length=4, max_length=10)
    assert fit_pair(*answers(4, 5, 2), cfg, "here") == (answers(4, 5, 2), 0)
    found, cut = fit_pair(*answers(7, 6, 2), cfg, "here")  # 13 tokens, of which 10 are kept
    assert [(ids[0], len(ids), sum(trained)) for ids, trained in found] == [(3, 10, 6), (3, 6, 2)]
    assert cut == 6
    assert fit_pair(*answers(7, 7, 2), cfg, "here") == ([], 0)  # the answer alone is too long


def test_long_pairs_are_dropped_or_refused(data_config) -> None:
    drop, refuse = (data_config("preference", max_length=10, on_too_long=p) for p in ("drop", "raise"))
    assert fit_pair(*answers(6, 4, 4), drop, "here") == (answers(6, 4, 4), 0)
    assert fit_pair(*answers(6, 9, 2), drop, "here") == ([], 0)
    with pytest.raises(BadRow, match=r"15 tokens and data\.max_length is 10"):
        fit_pair(*answers(6, 9, 2), refuse, "here")
    right, left = (data_config("preference", max_length=10, on_too_long=f"truncate_{p}") for p in ("right", "left"))
    with pytest.raises(BadRow, match="leaves no room"):
        fit_pair(*answers(10, 4, 4), right, "here")
    with pytest.raises(BadRow, match="leaves no room"):
        fit_pair(*answers(6, 16, 4), left, "here")


REAL = {
    "preference": (Path("local/dpo-messages"), 300),
    "preference_alpaca": (Path("rasbt/instruction-data-with-preference"), 1100),
}


@pytest.mark.parametrize("name", REAL)
def test_real_pairs(name: str, encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HUB.is_dir():
        pytest.skip("../shared/hub is not there")
    import datasets

    folder, number = REAL[name]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    data = datasets.load_dataset(str(HUB / "datasets" / folder), split="train")
    made, bad = encoder(), []
    for i, row in enumerate(data):
        try:
            chosen, rejected = made.encode(row, f"row {i}", made.chat.cfg, False).examples
        except BadRow as error:
            bad.append(error.reason)
            continue
        assert chosen[1].index(True) == rejected[1].index(True)
    assert len(data) == number
    assert made.words.partition(" ")[0] == "preference"
    assert len(bad) <= 0.02 * number, set(bad)


def test_the_formats_are_named_in_the_config() -> None:
    text = (Path(__file__).parents[2] / "conf/data/preference.yaml").read_text()
    assert all(f"{name} (" in text or f"{name}\n" in text for name in FORMATS["pairs"])
