"""Checkpoints that two ranks write together have the content of those written by rank 0, and are as portable."""

from pathlib import Path

import pytest
from strategy_runs import CAUSAL, LORA, Runs

from chats import write_chats
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from resume.runs import assert_equal
from support import rows
from tiny_pretrained import save_pretrained

pytestmark = pytest.mark.slow

FSDP = "trainer.strategy=fsdp"
SHARDED = [FSDP, "trainer.fsdp.sharded_checkpoint=true"]


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    r = Runs(tmp_path_factory.mktemp("runs"))
    model = f"model.name_or_path={save_pretrained(r.folder / 'llama', max_position_embeddings=512)}"
    tasks = {
        "text": [*CAUSAL, f"data.path={corpus}", "model.hidden_size=34"],  # not evenly divisible by the number of ranks
        "muon": [*CAUSAL, f"data.path={corpus}", "optimizer=muon"],
        "lora": [*LORA, f"data.path={write_chats(r.folder / 'chats.jsonl', 40)}", model],
    }
    for task, settings in tasks.items():
        r.two(f"{task}-full", *settings, FSDP)
        for name, background in (("sharded", "false"), ("async", "true")):
            r.two(f"{task}-{name}", *settings, *SHARDED, f"checkpoint.async_save={background}")
    r.launch()
    for task, settings in tasks.items():
        saved = f"run.resume={r.checkpoint(f'{task}-async', 10)}"
        r.one(f"{task}-to-one", *settings, saved)
        r.two(f"{task}-to-ddp", *settings, saved)
        r.two(f"{task}-to-sharded", *settings, *SHARDED, saved)
        r.two(f"{task}-full-to-sharded", *settings, *SHARDED, f"run.resume={r.checkpoint(f'{task}-full', 10)}")
    r.launch()
    return r


@pytest.mark.parametrize("task", ["text", "muon", "lora"])
@pytest.mark.parametrize("how", ["sharded", "async"])
def test_the_content_is_that_of_a_full_checkpoint(runs: Runs, task: str, how: str) -> None:
    for step in (10, 20):
        full, sharded = (Path(runs.checkpoint(f"{task}-{name}", step)) for name in ("full", how))
        assert {p.name for p in sharded.iterdir()} == {
            "model.safetensors", "optimizer.safetensors", "trainer.pt", "manifest.json"
        }  # fmt: skip
        assert store.damage(sharded) is None
        assert_equal(store.load(full), store.load(sharded), full.name)
    assert {p.name for p in sharded.parent.iterdir()} == {p.name for p in full.parent.iterdir()}


@pytest.mark.parametrize("task", ["text", "muon", "lora"])
def test_they_travel(runs: Runs, task: str) -> None:
    for name in ("one", "ddp"):
        runs.compare(f"{task}-to-{name}", f"{task}-full")
    whole = [without_times(r) for r in rows(runs.folder / f"{task}-full" / "metrics.jsonl") if r["step"] > 10]
    for name in ("to-sharded", "full-to-sharded"):  # on the same number of ranks nothing differs at all
        assert whole == [without_times(r) for r in rows(runs.folder / f"{task}-{name}" / "metrics.jsonl")]
    exports = [next((runs.folder / f"{task}-{name}" / "export").glob("*model.safetensors")).read_bytes()
               for name in ("full", "sharded")]  # fmt: skip
    assert exports[0] == exports[1]
