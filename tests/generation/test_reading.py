"""What is said beside a sample of training, and the guard against its loops."""

from pathlib import Path

import pytest

from inprocess import train_tiny
from lmtrain.generation.text_metrics import reading
from support import rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(x):\n    return x\n\ny = f(1\nz = 2\ncut o", "parses: 3 of 5 lines"),
        ("def f(x):\n    return x\ny = 1\n", "parses: 2 of 2 lines"),
        ("def f(x)\n  return\n", "parses: 0 of 1 lines"),
        ("\0\nx = 1\n(", "parses: 0 of 2 lines"),
        ("(" * 5000 + "\nx", "parses: 0 of 1 lines"),
    ],
)
def test_the_lines_that_parse(text: str, said: str) -> None:
    assert reading(text) == said


def test_it_stands_beside_the_sample_and_nothing_repeats(corpus: Path, tmp_path: Path) -> None:
    words = ["callbacks.samples.reading=python", "callbacks.samples.no_repeat=2", "callbacks.samples.max_new_tokens=40",
             "callbacks.samples.prompts=[x]", "callbacks.samples.temperature=0"]  # fmt: skip
    ended = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", "callbacks.samples.every_n_validations=1", *words)
    assert ended.code == 0, ended.err
    sample = rows(tmp_path / "run" / "samples.jsonl")[-1]
    assert sample["reading"] == reading("x" + sample["text"])
    assert f"| {sample['reading']}" in ended.out
    pairs = [sample["text"][i : i + 2] for i in range(len(sample["text"]) - 1)]  # the tokenizer is one of bytes
    assert len(pairs) == len(set(pairs)), "an untrained model repeats itself without the guard"
