"""`lmtrain.evaluate` on several gloo ranks gives exactly the numbers of one device."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from chats import write_chats, write_rows
from inprocess import message, run
from lmtrain.distributed import process_group as world
from lmtrain.errors import UserError
from lmtrain.evaluation import harness
from lmtrain.evaluation.scoring import negative_log_likelihoods, windows
from lmtrain.models.language_model import LanguageModel
from ranks_again import TORCHRUN, run_ranks
from support import Run, rows
from tiny_pretrained import save_pretrained

SETTINGS = ["evaluate.batch_size=3", "evaluate.resamples=50", "trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Saves two models with one tokenizer and random weights."""
    folder = tmp_path_factory.mktemp("models")
    return [
        save_pretrained(folder / f"model_{r}", max_position_embeddings=512, initializer_range=r) for r in (0.2, 0.3)
    ]


def test_parts_are_the_batches_that_one_would_make(models: list[Path]) -> None:
    model = LanguageModel(AutoModelForCausalLM.from_pretrained(models[0])).eval()
    lengths = np.random.default_rng(0).integers(2, 60, 130)
    stretches = [w for i, n in enumerate(lengths) for w in windows(np.arange(n) % 250, i, 20, 7)]
    whole = list(negative_log_likelihoods(model, stretches, 4))
    for n in (2, 3, 5):
        parts = [list(negative_log_likelihoods(model, stretches, 4, part=(i, n))) for i in range(n)]
        assert all(parts)
        assert sorted(found for part in parts for found in part) == sorted(whole), "to the last bit"


def test_each_rank_does_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks process three, two and two of seven items; each gets all results, in the order of the items."""
    items, shares = list("abcdefg"), (["a", "d", "g"], ["b", "e"], ["c", "f"])
    monkeypatch.setattr(world, "size", lambda: 3)
    monkeypatch.setattr(world, "together", lambda make: make())
    for rank, share in enumerate(shares):
        done: list[str] = []
        others = [[item.upper() for item in theirs] for theirs in shares]
        monkeypatch.setattr(world, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(world, "gathered", lambda mine, r=rank, o=others: [*o[:r], mine, *o[r + 1 :]])
        assert world.shared_out(items, lambda item, d=done: d.append(item) or item.upper()) == list("ABCDEFG")
        assert done == share


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is also raised on ranks that are behind; each rank is a thread, and every exchange waits for both."""
    here, meeting, sent = threading.local(), threading.Barrier(2, timeout=30), [None, None]

    def all_gather_object(found: list[object], mine: object) -> None:
        sent[here.rank] = mine
        meeting.wait()
        found[:] = sent
        meeting.wait()

    def score() -> None:
        if here.rank == broken:
            raise UserError("can't be read")
        world.gathered("what the harness waits for first")

    def job(rank: int) -> tuple[str, list[int]]:
        here.rank = rank
        with pytest.raises(UserError) as raised:
            world.together(score)
        return str(raised.value), world.gathered(rank)

    monkeypatch.setattr(world, "size", lambda: 2)
    monkeypatch.setattr(world.dist, "all_gather_object", all_gather_object)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(job, range(2))) == [("can't be read", [0, 1])] * 2


def test_fewer_documents_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "size", lambda: 3)
    with pytest.raises(UserError, match=r"for 3 devices: set trainer\.devices=2"):
        harness.check_limit(2)
    harness.check_limit(3)
    harness.check_limit(None)


@pytest.mark.slow
def test_the_numbers_are_those_of_one_device(models: list[Path], corpus: Path, tmp_path: Path) -> None:
    """Text with a second model, chats with answers, and pairs with a reference; the ranks' parts differ in size."""
    chats, pairs = write_chats(tmp_path / "c.jsonl", 30), write_rows(tmp_path / "p.jsonl", "preference_jsonl")
    template = "data.chat_template=vicuna"
    text = ["data=text", f"data.val_path={corpus}", "evaluate.context=64", "evaluate.stride=24", "evaluate.limit=7",
            f"evaluate.against={models[1]}"]  # fmt: skip
    answers = ["evaluate.answers=8", "evaluate.max_new_tokens=6"]
    kinds = {
        "text": text,
        "chats": ["data=chat_jsonl", f"data.path={chats}", template, *answers],
        "pairs": ["objective=dpo", "data=preference_jsonl", f"data.path={pairs}", template,
                  f"evaluate.reference={models[1]}"],
    }  # fmt: skip
    jobs = [[f"run_dir={models[0]}", *SETTINGS, f"evaluate.name={name}", *words] for name, words in kinds.items()]
    for job in jobs:
        assert (ended := run("evaluate", *job, f"evaluate.dir={tmp_path / 'one'}")).code == 0, ended.err
    (tmp_path / "jobs.json").write_text(json.dumps([[*job, f"evaluate.dir={tmp_path / 'two'}"] for job in jobs]))
    script = Path(__file__).with_name("evaluations.py")
    done = run_ranks([*TORCHRUN, str(script), str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("written:") == 3, "by the first rank alone"
    found = {}
    for name in kinds:
        one, two = ((tmp_path / n / f"{name}.json").read_text() for n in ("one", "two"))
        assert one == two
        lines = [rows(tmp_path / n / f"{name}.rows.jsonl") for n in ("one", "two")]
        assert lines[0] == lines[1]
        found[name] = json.loads(one)
    assert found["text"]["difference"]["loss"]["value"] != 0
    assert (found["chats"]["data"]["conversations"], found["chats"]["data"]["answers"]) == (30, 8)
    assert {"loss", "exact_match", "bleu", "rouge"} <= set(found["chats"]["scores"])
    assert 0 < found["pairs"]["scores"]["accuracy"] < 1


@pytest.mark.slow
def test_what_one_rank_finds_wrong_is_said_once(models: list[Path], tmp_path: Path, forked_lmtrain: Run) -> None:
    """If the second model can't be loaded, one message says so and the scores of the first are kept."""
    (tmp_path / "a.txt").write_text("a line of text\n" * 9)
    argv = [f"run_dir={models[0]}", "data=text", f"data.val_path={tmp_path / 'a.txt'}", "trainer.devices=2"]
    ended = forked_lmtrain("evaluate", *SETTINGS, *argv, f"evaluate.against={models[1]}_x", f"evaluate.dir={tmp_path}")
    assert ended.returncode == 2
    said = message(ended.stderr)
    assert "no such folder; did you mean" in said
    assert "alone are kept" in said
    assert len(list(tmp_path.glob("*.rows.jsonl"))) == 1


def test_a_split_model_is_refused(models: list[Path]) -> None:
    ended = run("evaluate", f"run_dir={models[0]}", "trainer.devices=2", "trainer.strategy=fsdp")
    assert ended.code == 2
    assert "holds a whole model on each device" in message(ended.err)
