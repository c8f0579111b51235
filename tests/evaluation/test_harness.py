"""lm-evaluation-harness on runs: the log-likelihoods equal our own, and the file of results is complete."""

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from chats import CITIES, write_chats
from inprocess import TWO_STEPS, message, run, train_tiny
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


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness_it_says_what_to_install(tmp_path: Path) -> None:
    ended = run("evaluate", f"run_dir={tmp_path}", "evaluate.tasks=[hellaswag]")
    assert ended.code == 2
    assert 'pip install "lmtrain[lm-eval]"' in message(ended.err)
