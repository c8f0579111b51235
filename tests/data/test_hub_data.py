"""Datasets of the hub: a repository in a folder, a hub that does not answer, and, where available, the loopback hub."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import documents

from lmtrain.data.hub import commit_of
from lmtrain.data.sources.choose import open_parts, split_records
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError
from loopback_hub import HUB, serving

CONFTEST = Path(__file__).with_name("conftest.py")


def repository(folder, **splits):
    """Writes a dataset repository in the hub's layout and returns its path."""
    (folder / "data").mkdir(parents=True)
    files = [{"split": name, "path": f"data/{name}-*"} for name in splits]
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: " + json.dumps(files) + "\n---\n"
    )
    for name, rows in splits.items():
        pq.write_table(pa.table({"text": rows}), folder / "data" / f"{name}-00000.parquet")
    return str(folder)


@pytest.fixture(autouse=True)
def _hf_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_a_repository(streaming, tmp_path, data_config):
    name = repository(
        tmp_path / "repo", train=[f"row {i}" for i in range(600)] + [None, ""], validation=["held", "out"]
    )
    cfg = data_config("c4", name=name, config_name=None, streaming=streaming, num_samples=None, val_split="validation")
    assert list(documents(cfg, "train")) == [f"row {i}" for i in range(600)]
    assert list(documents(cfg, "val")) == ["held", "out"]
    cfg.num_samples, cfg.val_split = 300, "nope"
    assert list(documents(cfg, "val")) == [f"row {i}" for i in range(14, 300, 15)]  # 20 rows, since 3 are too few
    cfg.num_samples, cfg.val_split = None, "validation+train"
    assert list(documents(cfg, "val")) == ["held", "out"] + [f"row {i}" for i in range(600)]
    cfg.text_column = "body"
    with pytest.raises(UserError, match=r"no column 'body'; it has: text"):
        list(documents(cfg, "train"))
    cfg.text_column, cfg.train_split = "text", "training"
    with pytest.raises(UserError, match=r"no split 'training'; it has: train, validation"):
        list(documents(cfg, "train"))


def test_a_split_that_is_not_there_is_in_the_notes(tmp_path, data_config, tokenizer_config):
    name = repository(tmp_path / "repo", train=[f"row {i}" for i in range(600)], validation=["held", "out"])
    found = {}
    for split in ("validation", "valid"):
        cfg = data_config("c4", name=name, config_name=None, streaming=False, num_samples=None, val_split=split)
        found[split] = prepare(cfg, tokenizer_config("bytes"), False).notes
    assert found["validation"] == []
    assert found["valid"] == [
        f"dataset {name!r} has no split 'valid' (data.val_split; it has: train, validation): a part of split train is "
        f"held out (data.val_fraction)"
    ]


def test_wikitext_lines_become_articles(tmp_path, data_config):
    rows = ["", " = One = \n", "", " text \n", " = = Part = = \n", "", " = Two = \n", " more \n"]
    name = repository(tmp_path / "repo", train=rows, validation=rows[:4])
    cfg = data_config("wikitext", name=name, config_name=None)
    assert list(documents(cfg, "train")) == ["".join(rows[:6]), "".join(rows[6:])]


def test_a_changed_repository_is_prepared_again(tmp_path, data_config, tokenizer_config):
    name = repository(tmp_path / "repo", train=["a"] * 200)
    cfg = data_config("openwebtext", name=name)
    first = prepare(cfg, tokenizer_config(), progress=False)
    assert prepare(cfg, tokenizer_config(), progress=False).folder == first.folder
    pq.write_table(pa.table({"text": ["b"] * 200}), Path(name) / "data" / "train-00000.parquet")
    assert prepare(cfg, tokenizer_config(), progress=False).folder != first.folder


def test_an_unreachable_hub_names_the_way_out(data_config, tokenizer_config):
    began = time.perf_counter()
    with pytest.raises(UserError, match=r"dataset 'some/dataset' can't be fetched.*HF_ENDPOINT.*data=python_stdlib"):
        prepare(data_config("openwebtext", name="some/dataset"), tokenizer_config(), progress=False)
    with pytest.raises(UserError, match=r"tokenizer 'some/tokenizer' can't be fetched.*HF_HOME.*tokenizer=bpe"):
        prepare(data_config("python_stdlib"), tokenizer_config("hub", name_or_path="some/tokenizer"), progress=False)
    assert time.perf_counter() - began < 20  # the libraries alone retry for 23 to 48 s; loaded machines are slow


def test_a_commit_needs_no_question():
    commit = "0123456789abcdef" * 2 + "01234567"
    assert commit_of("dataset", "any/thing", commit) == (commit, "")


CHILD = """
import importlib.util, json, sys, time
import datasets, transformers  # before any clock
spec = importlib.util.spec_from_file_location("configs", sys.argv[1])
configs = importlib.util.module_from_spec(spec); spec.loader.exec_module(configs)
from lmtrain.data.text.prepare import prepare
from lmtrain.data.sources.choose import open_parts, split_records
from lmtrain.errors import UserError
from lmtrain.config.schema import TokenizerConfig

for data, data_settings, tokenizer, tokenizer_settings in json.loads(sys.argv[2]):
    cfg = configs.data_of({**configs._load("data", data), "seq_len": 64, **data_settings})
    began = time.perf_counter()
    try:
        prepared = prepare(cfg, TokenizerConfig(**{**configs._load("tokenizer", tokenizer), **tokenizer_settings}))
        result = {"folder": str(prepared.folder), "splits": prepared.meta["splits"]}
    except UserError as error:
        result = {"error": str(error)}
    print("RESULT", json.dumps({**result, "seconds": time.perf_counter() - began}), flush=True)
"""


def ask(endpoint, home, cache, *jobs, **env):
    """Runs jobs (data option, settings, tokenizer option, settings) in one separate process; returns their results."""
    full = [(d, {"cache_dir": str(cache), **ds}, t, ts) for d, ds, t, ts in jobs]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(CONFTEST), json.dumps(full)],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


@pytest.mark.slow
def test_a_silent_hub_is_given_up_on(tmp_path):
    """A hub that takes connections but never answers is soon given up on; `datasets` alone would retry for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        jobs = [("wikitext", {}, "bytes", {}), ("python_stdlib", {}, "gpt2", {})]
        answers = ask(endpoint, tmp_path / "home", tmp_path / "cache", *jobs, HF_HUB_ETAG_TIMEOUT="1")
    assert "dataset 'Salesforce/wikitext' can't be fetched" in answers[0]["error"]
    assert "tokenizer 'gpt2' can't be fetched" in answers[1]["error"]
    assert all(a["seconds"] < 20 for a in answers)  # the limit used above


@pytest.fixture(scope="module")
def loopback(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home")) as environ:
        yield environ["HF_ENDPOINT"]


@pytest.mark.slow
def test_the_hub_by_name_then_without_it(loopback, tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    wikitext = ("wikitext", {"num_samples": 40}, "gpt2", {})
    shakespeare = ("tiny_shakespeare", {}, "char", {})
    bad = [
        ("wikitext", {"name": "no/such"}, "bytes", {}),
        ("wikitext", {"config_name": "nope"}, "bytes", {}),
        ("wikitext", {"revision": "v9"}, "bytes", {}),
        ("wikitext", {}, "hub", {"name_or_path": "no/such"}),
    ]
    first, plays, *errors = ask(loopback, home, cache, wikitext, shakespeare, *bad)
    assert first["splits"]["train"]["documents"] == first["splits"]["val"]["documents"] == 40
    assert (plays["splits"]["train"]["tokens"], plays["splits"]["val"]["tokens"]) == (1_003_854, 111_540)
    messages = [
        "dataset 'no/such' doesn't exist on http://127.0.0.1",
        "BuilderConfig 'nope' not found. Available: ['wikitext-2-raw-v1']",
        "dataset 'Salesforce/wikitext' has no revision 'v9'",
        "tokenizer 'no/such' doesn't exist on http://127.0.0.1",
    ]
    for found, message in zip(errors, messages, strict=True):
        assert message in found["error"]

    # Without the hub, prepared data is reused, and more data can be prepared from the hub's cached copies.
    more = ("wikitext", {"num_samples": 41}, "gpt2", {})
    again, later = ask("http://127.0.0.1:9", home, cache, wikitext, more)
    assert again["folder"] == first["folder"]
    assert later["splits"]["train"]["documents"] == 41
    assert max(again["seconds"], later["seconds"]) < 20  # the limit used above


def test_tiny_shakespeare_from_a_file_is_nanogpts(tmp_path, data_config, tokenizer_config):
    path = HUB / "datasets" / "karpathy" / "tiny_shakespeare" / "raw" / "input.txt"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    prepared = prepare(data_config("tiny_shakespeare", path=str(path)), tokenizer_config("char"), progress=False)
    assert [prepared.meta["splits"][s]["tokens"] for s in ("train", "val")] == [1_003_854, 111_540]
    assert prepared.meta["vocab_size"] == 65 + 2


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("rows", "said"), [
    ('{"messages": ["a", "b"]}\n{"mess', "JSON parse error"), ("", "holds no rows"),
    ("9" * 5000, "can't be (loaded|read)"),
    ('{"messages": ' + "[" * 5000, "can't be (loaded|read)"),
], ids=["malformed", "empty", "digits", "deep"])  # fmt: skip
def test_a_damaged_file_of_a_repository_is_one_message(rows, said, streaming, tmp_path, data_config):
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.jsonl").write_text(rows)
    settings = {"train_split": "train", "val_split": None, "val_fraction": 0, "streaming": streaming}
    cfg = data_config("ultrachat", name=str(tmp_path / "repo"), **settings)
    with pytest.raises(UserError, match=rf"dataset '.*repo'.*{said}") as caught:
        list(split_records(*open_parts(cfg), "train"))
    assert "\n" not in str(caught.value)
