"""How rows of a file that is named alone are trained on, told by their columns and values."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from inprocess import run
from lmtrain.config.compose import check, compose
from lmtrain.config.overrides import leaves
from lmtrain.data import tokenizers
from lmtrain.data.chat.columns import detect
from lmtrain.data.corpus import row_format
from lmtrain.data.sources.files import read_records
from lmtrain.errors import UserError
from lmtrain.first_words.proposal import propose


def proposed(paths: list[str], typed: list[str]) -> dict[str, Any]:
    """Returns the keys and values of what is proposed for these files."""
    return leaves([proposal.override for proposal in propose(paths, typed)])


ROWS = '"prompt","completion","label"\n"Two plus two?","Four.",{}\n"Two plus two?","Five.",{}\n'


@pytest.mark.parametrize(("labels", "objective"), [
    (("true", "false"), "kto"),
    (("1", "0"), "kto"),
    (("1.0", "0.0"), "kto"),
    (("True", "False"), "kto"),
    (("good", "bad"), None),  # a label of another kind: conversations
    (("5", "1"), None),
])  # fmt: skip
def test_labels_of_a_csv_file_are_text(labels: tuple[str, str], objective: str | None, tmp_path: Path) -> None:
    """An answer with the label false must not be learned as that of a conversation."""
    file = tmp_path / "answers.csv"
    file.write_text(ROWS.format(*labels))
    keys = proposed([str(file)], [])
    assert keys.get("objective") == objective
    assert keys["data"] == ("unpaired_jsonl" if objective == "kto" else "chat_jsonl")


def test_labelled_conversations_are_not_learned_as_good_ones(tmp_path: Path) -> None:
    """LLaMA-Factory's rows of KTO: half of the answers are labelled false."""
    file, turns = tmp_path / "kto.json", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps([{"messages": turns, "label": i % 2 == 0} for i in range(4)]))
    keys = proposed([str(file)], ["model=x/y"])
    assert (keys["objective"], keys["data"]) == ("kto", "unpaired_jsonl")
    assert "columns messages, label" in propose([str(file)], [])[0].reason
    file.write_text(json.dumps([{"messages": turns, "label": "fine"}]))
    assert proposed([str(file)], [])["data"] == "chat_jsonl"


@pytest.mark.parametrize(("row", "recipe", "objective", "optimizer"), [
    ({"prompt": "a", "response": "b"}, "sft_small", "sft", "adamw"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo_small", "dpo", "muon"),
])  # fmt: skip
def test_a_small_model_of_ones_own_gets_the_recipe_of_small_models(
    row: dict[str, str], recipe: str, objective: str, optimizer: str, tmp_path: Path
) -> None:
    file, weights = tmp_path / "rows.jsonl", tmp_path / "mine" / "export" / "model.safetensors"
    file.write_text(json.dumps(row) + "\n")
    weights.parent.mkdir(parents=True)
    for size, typed, small in ((79, [], True), (79, ["optimizer=adamw"], False), (81, [], False)):
        with weights.open("wb") as there:
            there.truncate(size * 1_000_000)  # 20 M parameters in fp32 are 80 MB
        for folder in (tmp_path / "mine", weights.parent):
            keys = proposed([str(file)], [f"model={folder}", *typed])
            assert keys.get("experiment") == (recipe if small else None)
            assert keys.get("objective") == (None if small else objective)
    words = [f"experiment={recipe}", "data.chat_template=alpaca", f"model.name_or_path={weights.parent}"]
    config = check(compose([*words, f"data.path={file}"]))
    assert (config.objective.name, config.optimizer.name) == (objective, optimizer)
    assert config.budget.minutes or config.budget.updates == "auto"


@pytest.mark.parametrize(("objective", "columns", "said"), [
    ("sft", {"label": False, "score": 0.5}, ["label is not read; data=unpaired_jsonl reads", "score is not read"]),
    ("sft", {"label": "fine", "rejected": "c"}, ["label is not read", "rejected is not read"]),
    ("sft", {"topic": "x", "weight": None}, []),
    ("dpo", {"chosen": "c", "rejected": "d", "margin": 1.0, "weight": 2}, ["weight is not read"]),
    ("kto", {"label": True, "rating": 5}, ["rating is not read"]),
])  # fmt: skip
def test_columns_with_a_meaning_are_used_or_named(
    objective: str, columns: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    words = ["data.chat_template=alpaca", f"data.cache_dir={tmp_path}", "data.seq_len=64", "tokenizer=bytes"]
    option = {"sft": "chat_jsonl", "dpo": "preference_jsonl", "kto": "unpaired_jsonl"}[objective]
    config = check(compose([f"objective={objective}", f"data={option}", "data.path=x", *words]))
    encoder = row_format(config)(tokenizers.load_or_train(config.tokenizer, lambda _: iter(())), config.data)
    encoded = encoder.encode({"prompt": "a", "response": "b", **columns}, "row 1", config.data, False)
    remarks = [remark.text for remark in encoded.remarks]
    assert len(remarks) == len(said)
    assert all(f"the column {words}" in remark for words, remark in zip(said, remarks, strict=True))


def test_a_row_without_its_label_is_no_conversation(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    row = '{"prompt": "a", "completion": "b", "label": %s}\n'
    file.write_text(row % "null" + row % "false")
    assert proposed([str(file)], [])["data"] == "unpaired_jsonl"
    file.write_text(row % "null")
    assert proposed([str(file)], [])["data"] == "chat_jsonl"


@pytest.mark.parametrize(("text", "columns"), [
    *((f"{names}\n{{}}", None) for names in ("Question,Answer", "Frage,Antwort", "input,output", "user,assistant")),
    ("{}", "{prompt: column_1, response: column_2}"),
    ("Kunde,Laden\n{}", "{prompt: Kunde, response: Laden}"),
    ("id,Kunde,Laden,tag\n7,{},x\n", "{prompt: Kunde, response: Laden}"),
])  # fmt: skip
def test_a_table_of_questions_is_not_read_for_its_answers_alone(text: str, columns: str | None, tmp_path: Path) -> None:
    rows = "What are your opening hours?,We are open Tuesday to Friday 10-18."
    more = rows if "{}," in text else f'{rows}\nDo you repair e-bikes?,"Yes, Bosch and Shimano."\n'
    file = tmp_path / "faq.csv"
    file.write_text(text.format(more))
    proposal = propose([str(file)], [])
    keys = leaves([p.override for p in proposal])
    assert (keys["data"], keys.get("experiment")) == ("chat_jsonl", "sft_smollm2_lora")
    assert keys.get("data.columns") == (yaml.safe_load(columns) if columns else None)
    assert ("data.text_column=" in proposal[0].reason) == (columns is not None)
    config = check(compose([*(p.override for p in proposal), "model.name_or_path=x"]))
    reading = detect("conversations", next(iter(read_records([(file, "csv")])))[1], config.data)
    assert reading.columns["prompt"] in ("Question", "Frage", "input", "user", "column_1", "Kunde")
    as_text = proposed([str(file)], [f"data.text_column={reading.columns['response']}"])
    assert as_text["data"] == "jsonl"


def test_two_columns_of_text_of_which_one_is_shorter_are_asked_about(tmp_path: Path) -> None:
    file = tmp_path / "news.csv"
    file.write_text("head,long\n" + "A cat is found,The cat was found on a roof and brought home by a man.\n" * 4)
    with pytest.raises(UserError, match=r"two columns of text, head and long. Questions and answers\?.*data\.text_col"):
        propose([str(file)], [])
    pair, text = "data.columns={prompt: head, response: long}", "data.text_column=long"
    for typed, data in ((pair, "chat_jsonl"), (text, "jsonl")):
        assert proposed([str(file)], [typed])["data"] == data
    file.write_text(file.read_text().replace("head,long", "title,text"))  # which says what is to be read
    assert proposed([str(file)], [])["data"] == "jsonl"


@pytest.mark.parametrize("sign", [";", "\t"])
def test_columns_that_other_signs_separate(sign: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"\ufeffQuestion{sign}Answer\nOpen, on Sundays?{sign}No.\n", encoding="utf-8")
    proposal = propose([str(file)], [])
    assert leaves([p.override for p in proposal])["data"] == "chat_jsonl"
    assert f"its columns are separated by {sign!r}" in proposal[0].reason


@pytest.mark.parametrize("verb", ["train", "prepare", "inspect", "tune", "verify", "estimate"])
def test_every_verb_that_reads_data_takes_what_is_proposed(verb: str, tmp_path: Path) -> None:
    """budget.updates, of which most of them read nothing, is refused where it is typed only."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    shown = run(verb, str(file), "model=x/y", "--cfg")
    assert shown.code == 0, shown.err
    assert "updates: auto" in shown.out
    typed = run(verb, str(file), "model=x/y", "budget.updates=50", "--cfg")
    assert typed.code == (0 if verb == "train" else 2), typed.err
