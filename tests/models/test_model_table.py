"""The table of models (benchmarks/model_table.py): ten of them go through the columns that take no second run."""

from pathlib import Path

import pytest
from model_table import COLUMNS, GOOD, Trial, page

# Ways in which families differ, and two multimodal wrappers.
TEN = ("gpt2", "qwen3", "gpt_oss", "bloom", "mamba", "lfm2", "nemotron_h", "falcon_h1", "gemma3", "mistral3")
QUICK = ("trains", "packs", "exports", "reloads")


@pytest.mark.parametrize("name", TEN)
def test_a_family_trains_and_comes_back(name: str, tmp_path: Path) -> None:
    trial = Trial(name, tmp_path)
    found = {column: getattr(trial, column)() for column in QUICK}
    assert set(found.values()) <= set(GOOD), found


def test_the_page_names_every_model_once_with_its_reason() -> None:
    good = dict.fromkeys(COLUMNS, "yes")
    results = [
        {"model": "llama", **good},
        {"model": "bloom", **good, "packs": "as rows"},
        {"model": "bert", "trains": "refused: one | message"},
        {"model": "gemma3", **good, "merges": "off by 0.1"},
        {"model": "gemma3n", "not built": "ImportError: timm"},
    ]
    text = page(results)
    assert "| causal language models | 2 | 1 | 0 | 0 |" in text
    assert "| bert | *trains*: one / message |" in text
    assert "| gemma3 | *merges*: off by 0.1 |" in text
    assert "| gemma3n | ImportError: timm |" in text
    assert "padded rows: bloom." in text
