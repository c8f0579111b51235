"""How rows of a file that is named alone are trained on, told by their columns and values."""

from pathlib import Path

import pytest

from lmtrain.config.override_text import typed_keys
from lmtrain.errors import UserError
from lmtrain.first_words.proposal import propose

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
    keys = typed_keys(propose([str(file)], []).overrides)
    assert keys.get("objective") == objective
    assert keys["data"] == ("unpaired_jsonl" if objective == "kto" else "chat_jsonl")


def test_a_row_without_its_label_is_no_conversation(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    row = '{"prompt": "a", "completion": "b", "label": %s}\n'
    file.write_text(row % "null" + row % "false")
    assert typed_keys(propose([str(file)], []).overrides)["data"] == "unpaired_jsonl"
    file.write_text(row % "null")
    assert typed_keys(propose([str(file)], []).overrides)["data"] == "chat_jsonl"


@pytest.mark.parametrize("sign", [";", "\t"])
def test_columns_that_other_signs_separate(sign: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"text{sign}label\nhello{sign}1\n")
    with pytest.raises(UserError, match=r"rows\.csv, line 1: the columns are separated by '(;|\\t)', which is read as"):
        propose([str(file)], [])
