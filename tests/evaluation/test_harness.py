"""lm-evaluation-harness on runs: the log-likelihoods equal our own, and the file of results is complete."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from chats import CITIES, write_chats
from inprocess import TWO_STEPS, message, run, train_tiny
from lmtrain.config import compose as rules
from lmtrain.evaluation import harness
from lmtrain.evaluation.results import Scores, interval
from support import REPO, TINY
from tiny_pretrained import save_pretrained


def python() -> str:
    found = Path(os.environ.get("LMTRAIN_LM_EVAL_PYTHON", REPO / ".venv-lm-eval" / "bin" / "python"))
    if not found.exists():
        pytest.skip(f"needs lm-evaluation-harness in an environment of its own: make env-lm-eval ({found} isn't there)")
    return str(found)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Writes a user's own task: which of five cities follows."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"line {i}: is {city} far?", "choices": CITIES, "label": i} for i, city in enumerate(CITIES)]
    (folder / "cities.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    task = {"task": "cities", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": str(folder / "cities.jsonl")}},
            "doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}], "metadata": {"version": 1.0}}  # fmt: skip
    (folder / "cities.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.slow
def test_log_likelihoods_are_our_own(corpus: Path, tasks: Path, tmp_path: Path) -> None:
    command = python()
    assert train_tiny(corpus, "optimizer.lr=0.01", f"run.dir={tmp_path / 'whole'}").code == 0
    wide = {"hidden_size": 64, "intermediate_size": 128}  # 4-bit weights are quantised in blocks of 64
    base, rows = (
        save_pretrained(tmp_path / "base", max_position_embeddings=512, **wide),
        write_chats(tmp_path / "c.jsonl", 30),
    )
    common = [o for o in TINY if not o.startswith(("tokenizer=", "model.", "data.seq_len"))]
    chats = ["objective=sft", "data=chat_jsonl", f"data.path={rows}", "data.chat_template=vicuna", "data.seq_len=512",
             "data.packing=greedy", "data.val_fraction=0.2"]  # fmt: skip
    models = [str(tmp_path / "whole")]
    for peft in ("lora", *(["qlora"] if find_spec("bitsandbytes") is not None else [])):
        adapter = ["model=pretrained", f"model.name_or_path={base}", f"peft={peft}", "optimizer.lr=0.1"]
        ended = run("train", *common, *TWO_STEPS, *chats, *adapter, f"run.dir={tmp_path / peft}")
        assert ended.code == 0, ended.err
        models.append(str(tmp_path / peft))
    script = Path(__file__).with_name("lm_eval_harness.py")
    words = [command, str(script), str(tasks), str(tmp_path / "found"), *models]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in models:
        one = found["models"][name]
        assert len(one["harness"]) == 25
        assert one["harness"] == pytest.approx(one["ours"], abs=1e-4)
        assert min(one["harness"]) < -1

    assert found["code"] == 0
    written = json.loads((tmp_path / "found/cities.json").read_text())
    assert 0 <= written["scores"]["cities/acc"] <= 1
    assert set(written["difference"]["cities/acc"]) == {"value", "low", "high"}
    assert written["data"]["documents of cities"] == 5
    lines = [json.loads(line) for line in (tmp_path / "found/cities.rows.jsonl").read_text().splitlines()]
    whole = found["models"][models[0]]["harness"]
    right = [max(range(5), key=whole[5 * i : 5 * i + 5].__getitem__) == i for i in range(5)]
    assert [line["cities/acc"] for line in lines] == [float(r) for r in right]
    code, said = found["unknown"]
    assert code == 2
    assert "has no task 'hellaswagg'; did you mean hellaswag" in message(said)


def test_answers_that_a_task_reads_in_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness lists each document of gsm8k twice, once per filter; both scores and the number of documents stay."""
    strict, flexible = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]
    samples = [
        {"doc_id": number, "filter": kind, "exact_match": score}
        for number, scores in enumerate(zip(strict, flexible, strict=True))
        for kind, score in zip(("strict-match", "flexible-extract"), scores, strict=True)
    ]
    results = {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A",
               "exact_match,flexible-extract": 0.75, "alias": "gsm8k"}  # fmt: skip
    found = {"results": {"gsm8k": results}, "samples": {"gsm8k": samples}, "versions": {"gsm8k": 3.0}}
    monkeypatch.setattr(harness, "run", lambda *_: found)
    monkeypatch.setattr(harness, "refuse_scalar_head", lambda *_: None)
    monkeypatch.setattr(harness, "version", lambda _: "0.4.13")
    config = rules.check(rules.compose(["tokenizer=bytes", "evaluate.tasks=[gsm8k]"]))
    scored = harness.evaluate(SimpleNamespace(model=SimpleNamespace(model=None)), config, None)
    assert scored.scores.values() == {
        "gsm8k/exact_match (strict-match)": 0.25, "gsm8k/exact_match (flexible-extract)": 0.75,
    }  # fmt: skip
    assert scored.data == {"documents of gsm8k": 4}
    low, high = interval(scored.scores, "gsm8k/exact_match (strict-match)", 200, seed=1)[1:]
    assert 0 <= low < 0.25 < high < 1


def test_a_draw_without_documents_of_a_task_is_no_score() -> None:
    right = {"large": np.r_[np.ones(50), np.zeros(51)], "small": np.r_[np.zeros(100), 1.0]}
    own = {"large documents": np.r_[np.ones(100), 0.0], "small documents": np.r_[np.zeros(100), 1.0]}
    scores = Scores({**right, **own}, {task: (task, f"{task} documents") for task in right})
    assert interval(scores, "small", 200, seed=1) == (1.0, 1.0, 1.0)  # its only document is right
    assert 0.3 < interval(scores, "large", 200, seed=1).low < 0.5


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness_it_says_what_to_install(tmp_path: Path) -> None:
    ended = run("evaluate", f"run_dir={tmp_path}", "evaluate.tasks=[hellaswag]")
    assert ended.code == 2
    assert 'pip install "lmtrain[lm-eval]"' in message(ended.err)
