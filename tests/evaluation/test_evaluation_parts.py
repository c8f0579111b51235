"""The parts of an evaluation, each against a closed form or a stand-in of what it calls."""

import contextlib
import json
import math
import signal
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.config import compose as rules
from lmtrain.config.schema import Config
from lmtrain.errors import FAILED, UserError
from lmtrain.evaluation import harness, scoring, session
from lmtrain.evaluation.results import Evaluated, Results, Scores, _label, _rows_of, interval
from lmtrain.evaluation.scoring import Window, of_pairs, pair_scores
from lmtrain.objectives.dpo import DPO


def config(*words: str) -> Config:
    return rules.check(rules.compose(["tokenizer=bytes", *words]))


# Scores and their intervals


def test_a_score_is_a_ratio_of_sums_and_the_perplexity_its_exponential() -> None:
    scores = Scores({"nll": np.array([3.0, 9.0, 0.0]), "tokens": np.array([2.0, 4.0, 0.0])},
                    {"loss": ("nll", "tokens")}, {"bleu": 7.0})  # fmt: skip
    assert scores.values() == {"loss": 2.0, "perplexity": math.exp(2.0), "bleu": 7.0}
    assert scores.has_interval("loss")
    assert not scores.has_interval("bleu")
    assert not Scores({"nll": np.ones(2), "tokens": np.array([0.0, 3.0])}, scores.ratios).has_interval("loss")
    huge = Scores({"nll": np.array([900.0]), "tokens": np.ones(1)}, scores.ratios)
    assert huge.values()["perplexity"] == math.exp(700.0), "a number, whatever the loss"
    pairs = Scores({"loss": np.array([1.0, 3.0]), "pairs": np.ones(2)}, {"loss": ("loss", "pairs")})
    assert pairs.values() == {"loss": 2.0}, "no perplexity of a loss per pair"


def test_an_interval_is_between_percentiles_of_means_of_drawn_rows() -> None:
    """Against numpy's choice of rows with the same generator: the same rows for both models."""
    values, other, sizes = (
        np.array([1.0, 5.0, 2.0, 8.0]),
        np.array([1.0, 4.0, 4.0, 4.0]),
        np.array([1.0, 2.0, 1.0, 4.0]),
    )
    one, two = (Scores({"x": v, "n": sizes}, {"mean": ("x", "n")}) for v in (values, other))
    generator, alone, apart = np.random.default_rng(5), [], []
    for _ in range(50):
        rows = generator.integers(4, size=4)
        means = [v[rows].sum() / sizes[rows].sum() for v in (values, other)]
        alone.append(means[0])
        apart.append(means[0] - means[1])
    assert interval(one, "mean", 50, 5) == pytest.approx((2.0, *np.percentile(alone, [2.5, 97.5])))
    assert interval(one, "mean", 50, 5, two) == pytest.approx((16 / 8 - 13 / 8, *np.percentile(apart, [2.5, 97.5])))


def subject(name: str, vocabulary: dict[str, int] | None = None) -> Any:
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary)
    return SimpleNamespace(name=name, label="last", folder=None, tokenizer=tokenizer,
                           identity=lambda: {"name": name, "checkpoint": "last"})  # fmt: skip


def scored(values: list[float], fingerprint: str = "a", in_order: bool = True, score: str = "loss") -> Evaluated:
    columns = {"nll": np.array(values), "tokens": np.ones(len(values))}
    found = Scores(columns, {score: ("nll", "tokens")}, {"bleu": values[0]})
    return Evaluated(found, {"rows_fingerprint": fingerprint, "documents": 1234}, {"stride": 2}, in_order)


def test_models_are_compared_row_by_row_only_if_the_rows_are_known_to_be_the_same() -> None:
    def check(one: Evaluated, two: Evaluated) -> None:
        Results(config(), "x", [(subject("a"), one), (subject("b"), two)]).check_same_rows()

    check(scored([1, 2]), scored([3, 4]))
    check(scored([1, 2]), scored([3, 4], "b"))
    check(scored([1, 2], in_order=False), scored([3, 4], in_order=False))
    for one, two in ((True, False), (False, True)):
        with pytest.raises(UserError, match="which of their rows belong together"):
            check(scored([1, 2], in_order=one), scored([3, 4], "b", in_order=two))
    with pytest.raises(UserError, match="2 and 1 rows"):
        check(scored([1, 2]), scored([3]))


def test_losses_per_token_of_other_vocabularies_are_not_compared() -> None:
    def results(score: str, theirs: dict[str, int]) -> Results:
        models = [
            (subject("a", {"x": 0}), scored([1, 3], score=score)),
            (subject("b", theirs), scored([2, 5], score=score)),
        ]
        return Results(config("evaluate.resamples=20"), "all of a.txt", models)

    same, other = results("loss", {"x": 0}), results("loss", {"y": 0})
    assert same.comparable("loss")
    assert not other.comparable("loss")
    assert results("bits", {"y": 0}).comparable("bits")
    assert not same.comparable("bleu"), "a score of all rows at once"
    columns = [list(column.cells) for column in other.table().columns]
    assert columns == [["loss", "perplexity", "bleu"], ["2.0000", "7.3891", "1.0000"], ["3.5000", "33.1155", "2.0000"],
                       ["other tokens", "", ""]]  # fmt: skip
    assert same.table().columns[3]._cells[0].startswith("-1.5000 (-")
    tree = same.as_dict()
    assert tree["difference"]["loss"]["value"] == -1.5
    assert set(tree["difference"]) == {"loss"}
    assert other.as_dict()["difference"] == {}
    assert tree["against"]["model"]["name"] == "b"
    assert (tree["settings"], tree["data"]["what"], tree["data"]["documents"]) == ({"stride": 2}, "all of a.txt", 1234)
    alone = Results(same.config, same.words, same.models[:1])
    assert alone.table().title == "all of a.txt: 1,234 documents"
    assert len(alone.table().columns) == 2
    low, high = alone.as_dict()["intervals_95"]["loss"]
    assert alone.table().columns[1]._cells[0] == f"2.0000 ({low:.4f} to {high:.4f})"
    assert "against" not in alone.as_dict()


def test_results_are_written_to_be_read_and_not_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    (tmp_path / "other").mkdir()
    who = subject("é")
    who.folder = run
    report = Results(config("evaluate.resamples=5"), "all of é.txt", [(who, scored([1.0, 3.0]))])
    for _ in range(2):
        path = report.write()
        assert path == run / "evaluations" / "last-.txt.json"
        text = path.read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
        assert '"name": "é"' in text
    lines = (run / "evaluations" / "last-.txt.rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"nll": 1.0, "tokens": 1.0}, {"nll": 3.0, "tokens": 1.0}]
    (run / "evaluations").rename(run / "old")
    (run / "evaluations").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="is a link to"):
        report.write()
    assert not list((tmp_path / "other").iterdir())
    report.config.evaluate.dir = str(tmp_path / "a/b")
    assert report.write().parent == tmp_path / "a/b"


def test_rows_hold_numbers_texts_and_answers_of_some() -> None:
    scores = Scores({"nll": np.array([1, 2, 3]), "exact": np.array([1.0])}, {}, {}, {"answer": ["yes"]}, [2])
    assert _rows_of(scores) == [{"nll": 1.0}, {"nll": 2.0}, {"nll": 3.0, "exact": 1.0, "answer": "yes"}]
    both = Results(config(), "x", [(subject("a"), scored([1.0])), (subject("b"), scored([2.0]))])
    assert both._rows() == [{"nll": 1.0, "tokens": 1.0, "against": {"nll": 2.0, "tokens": 1.0}}]
    assert _label(f"all of /a/{'x' * 70}.txt") == "x" * 60
    assert _label("all of https://host/a?x=1/b, ~~c d~~") == "a--c-d"


# Losses


def test_windows_are_scored_longest_first_and_padded_little() -> None:
    spans = [Window(np.zeros(n), np.zeros(n), n) for n in (3, 9, 1, 7, 5)]
    assert [[w.row for w in batch] for batch in scoring._batches(spans, 2)] == [[9, 7], [5, 3], [1]]
    many = [Window(np.zeros(1 + n % 40), np.zeros(1), n) for n in range(40)]
    batches = list(scoring._batches(many, 2))
    assert sorted(w.row for batch in batches for w in batch) == list(range(40))
    assert [w.row for batch in batches[:16] for w in batch] == list(range(31, -1, -1)), "16 batches ahead"


def test_sums_of_rows_are_those_of_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 0.1, 1), (0, 1.5, 2), (2, 0.2, 3), (2, 0.3, 1)]
    monkeypatch.setattr(scoring, "negative_log_likelihoods", lambda *_: iter(found))
    nll, tokens = scoring._sums(None, [], config())  # type: ignore[arg-type]
    assert (nll.tolist(), tokens.tolist()) == ([1.5, 0.0, 0.6], [2, 0, 5])
    monkeypatch.setattr(scoring, "negative_log_likelihoods", lambda *_: iter([]))
    assert [len(column) for column in scoring._sums(None, [], config())] == [0, 0]  # type: ignore[arg-type]


def test_pairs_are_scored_as_the_loss_says() -> None:
    objective = config("objective=dpo", "objective.beta=0.3").objective
    policy, reference = np.array([-1.0, -3.0, -2.0, -1.5]), np.array([-1.2, -2.0, -1.0, -2.5])
    scores = pair_scores(policy, reference, np.array([4, 5, 6, 7]), lambda pairs: DPO.pair_losses(objective, pairs))  # type: ignore[arg-type]
    rewards = 0.3 * (policy - reference)
    margins = rewards[::2] - rewards[1::2]
    assert scores.columns["margin"] == pytest.approx(margins)
    assert scores.columns["loss"] == pytest.approx(np.log1p(np.exp(-margins)))
    assert scores.columns["chosen"] == pytest.approx(rewards[::2])
    assert scores.columns["rejected"] == pytest.approx(rewards[1::2])
    assert scores.values()["accuracy"] == 0.5
    assert scores.values()["margin"] == pytest.approx(margins.mean())
    assert scores.values()["rejected_reward"] == pytest.approx(rewards[1::2].mean())


def test_equal_rewards_are_half_right() -> None:
    scores = of_pairs(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 5.0, 2.0]))
    assert scores.columns["right"].tolist() == [0.5, 0.0, 1.0]
    assert scores.values() == {"loss": 3.0, "accuracy": 0.5, "margin": pytest.approx(-2 / 3), "chosen_reward": 2.0,
                               "rejected_reward": pytest.approx(8 / 3)}  # fmt: skip


def rows_of(lengths: list[int], left_out: int = 0, is_split: bool = False) -> Any:
    examples = type("E", (), {"lengths": np.array(lengths), "__len__": lambda self: len(lengths)})()
    return SimpleNamespace(examples=examples, left_out=left_out, is_split=is_split)


@pytest.mark.parametrize(("kind", "there"), [("pairs", 2), ("conversations", 4)])
def test_as_many_rows_are_scored_as_there_are_up_to_the_limit(
    kind: str, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    given = rows_of([3, 8, 5, 4])
    who: Any = SimpleNamespace(name="it", model=SimpleNamespace(model=None, has_scalar_head=False), tokenizer_name="t")
    monkeypatch.setattr(scoring.data, "kind_of", lambda data: kind)
    monkeypatch.setattr(scoring.data, "rows", lambda *_: given)
    monkeypatch.setattr(scoring, "refuse_scalar_head", lambda *_: None)
    monkeypatch.setattr(scoring, "positions", lambda model: 8)
    for name in ("_pairs", "_conversations"):
        monkeypatch.setattr(scoring, name, lambda who, config, rows, count: asked.append(count) or scored([1.0]))
    for words, count in (([], there), (["evaluate.limit=1"], 1), (["evaluate.limit=9"], there)):
        assert scoring.evaluate(who, config(*words), config()).all_in_order
        assert asked.pop() == count
    for left_out, is_split in ((1, False), (0, True)):
        given = rows_of([3, 8, 5, 4], left_out, is_split)
        assert not scoring.evaluate(who, config(), config()).all_in_order
    given = rows_of([3, 9, 5, 4])
    with pytest.raises(UserError, match=r"a row has 9 tokens and it positions for 8: set data.max_length=8"):
        scoring.evaluate(who, config(), config())


def test_a_scalar_head_is_asked_in_batches_and_its_loss_has_the_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []

    def scores_of(model: Any, rows: list[list[int]]) -> torch.Tensor:
        batches.append([len(row) for row in rows])
        return torch.tensor([float(len(row)) for row in rows])

    monkeypatch.setattr(scoring, "scores_of", scores_of)
    monkeypatch.setattr(scoring, "margins_of", lambda examples: np.array([0.5, 1.0, 9.0]))
    monkeypatch.setattr(scoring, "generation_mode", lambda model: contextlib.nullcontext())
    model = SimpleNamespace(device=torch.device("cpu"))
    examples = SimpleNamespace(read=lambda i: (np.zeros([4, 1, 2, 5, 7, 7][i]), None))
    rows: Any = SimpleNamespace(examples=examples, fingerprint="f")
    own = config("objective=reward", "objective.center_rewards_coefficient=0.1")
    who: Any = SimpleNamespace(model=SimpleNamespace(model=model), own=own)
    found = scoring._rewarded(who, config("evaluate.batch_size=3"), rows, 2)
    assert batches == [[4, 1, 2], [5]]
    losses = [math.log1p(math.exp(0.5 - 3)) + 0.1 * 5**2, math.log1p(math.exp(1.0 + 3)) + 0.1 * 7**2]
    assert found.scores.columns["loss"] == pytest.approx(losses)
    assert found.scores.columns["right"].tolist() == [1.0, 0.0]
    assert found.data == {"pairs": 2, "rows_fingerprint": "f"}


def test_a_reference_of_pairs_is_named() -> None:
    who: Any = SimpleNamespace(own=None, name="it")
    with pytest.raises(UserError, match="margins need a reference"):
        scoring.reference_model(who, config())
    who = SimpleNamespace(own=config(), name="it")
    with pytest.raises(UserError, match="margins need a reference"):
        scoring.reference_model(who, config())
    with pytest.raises(UserError, match="pairs are judged by a preference loss"):
        scoring._pairs(who, config(), rows_of([1]), 1)


# lm-evaluation-harness, by a stand-in for its modules


class Manager:
    """A task manager of the harness: a folder's own tasks, and beside them the harness's."""

    made: list[tuple[Any, bool]] = []  # noqa: RUF012

    def __init__(self, include_path: str | None, include_defaults: bool = True) -> None:
        Manager.made.append((include_path, include_defaults))
        self.all_tasks = [
            *(["mine"] if include_path else []),
            *(["arc_easy", "hellaswag", "hellaswap", "hellaswam", "hellaswat"] if include_defaults else []),
        ]
        self.task_index = dict.fromkeys(self.all_tasks)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a stand-in; returns the keywords of its last evaluation and what it returns next."""
    seen: Any = SimpleNamespace(given={}, returns={}, model={})

    def simple_evaluate(model: Any, **given: Any) -> Any:
        seen.given, seen.ran = given, model
        if isinstance(seen.returns, Exception):
            raise seen.returns
        return seen.returns

    class HFLM:
        def __init__(self, model: Any, **given: Any) -> None:
            seen.model = given

    modules = {"lm_eval": {"simple_evaluate": simple_evaluate}, "lm_eval.tasks": {"TaskManager": Manager},
               "lm_eval.models": {}, "lm_eval.models.huggingface": {"HFLM": HFLM}}  # fmt: skip
    for name, content in modules.items():
        module: Any = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(harness, "version", lambda _: "9.9")
    Manager.made.clear()
    return seen


@pytest.mark.usefixtures("library")
def test_tasks_are_looked_for_in_the_folder_first() -> None:
    def tasks(*words: str) -> list[str]:
        return harness.find(config(*words)).all_tasks

    folder = "evaluate.task_folder=tasks"
    assert tasks("evaluate.tasks=[mine]", folder) == ["mine"]
    assert Manager.made == [("tasks", False)], "without the harness's thousands"
    assert tasks("evaluate.tasks=[mine,arc_easy]", folder)[:2] == ["mine", "arc_easy"]
    Manager.made.clear()
    assert "mine" not in tasks("evaluate.tasks=[arc_easy]")
    assert Manager.made == [(None, True)]
    with pytest.raises(
        UserError, match=r"lm-eval 9\.9 has no task 'hellaswa'; did you mean hellaswa. or hellaswa. or hellaswa.\?"
    ):
        tasks("evaluate.tasks=[hellaswa]")
    with pytest.raises(UserError, match=r"lm-eval 9\.9 and tasks has no task 'minee'"):
        tasks("evaluate.tasks=[minee]", folder)


def a_subject() -> Any:
    model = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(model=SimpleNamespace(model=model), tokenizer="t")


@pytest.mark.parametrize("chat", [False, True])
def test_the_harness_is_called_with_the_settings(chat: bool, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "positions", lambda model: 2**31)
    monkeypatch.setattr(harness, "before_documents", lambda tokenizer: [5, 7])
    library.returns = {"results": {"r": 1}, "versions": {"v": 2}, "samples": {"t": [{"doc_id": 2}, {"doc_id": 0}]}}
    words = ["evaluate.tasks=[t]", "evaluate.fewshot=3", "evaluate.limit=4", f"evaluate.chat={chat}", "seed=11",
             "evaluate.batch_size=6"]  # fmt: skip
    found = harness.run(a_subject(), config(*words), "the manager")
    samples = {"t": [{"doc_id": 0}, {"doc_id": 2}]}
    assert found == {"results": {"r": 1}, "versions": {"v": 2}, "samples": samples}
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 11)
    assert library.given == {"tasks": ["t"], "task_manager": "the manager", "num_fewshot": 3, "limit": 4,
                             "apply_chat_template": chat, "bootstrap_iters": 0, **seeds}  # fmt: skip
    assert library.model == {
        "tokenizer": "t", "backend": "causal", "batch_size": 6, "add_bos_token": False if chat else None,
        "prefix_token_id": 7, "max_length": 2**20, "softmax_dtype": "float32",
    }  # fmt: skip
    assert (library.ran.rank, library.ran.world_size) == (0, 1)
    assert library.ran.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2]]
    assert (library.ran.gather_object("x"), library.ran.gather_object("x", dst=1)) == (["x"], None)
    harness._model(a_subject(), config("evaluate.context=33"))
    assert library.model["max_length"] == 33
    library.returns = None
    assert harness._run(a_subject(), config(*words), None) == {}
    library.returns = KeyError("no\n such split")
    with pytest.raises(UserError, match=r"evaluate\.tasks=t: KeyError: .no\\n such split"):
        harness._run(a_subject(), config(*words), None)


def test_a_limit_leaves_each_rank_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.world, "size", lambda: 4)
    for limit in (None, 4, 5):
        harness.check_limit(limit)
    with pytest.raises(UserError, match=r"limit=3 documents for 4 devices: set trainer\.devices=3"):
        harness.check_limit(3)


def test_metrics_that_are_no_means_over_documents_are_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"a": [{"doc_id": i, "acc": i % 2, "f1": 1.0, "odd": "x"} for i in range(4)],
               "b": [{"doc_id": 0, "acc": True}]}  # fmt: skip
    results = {"a": {"acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.9, "odd,none": 3, "alias": "a"},
               "b": {"acc,none": 1.0}}  # fmt: skip
    found = {"samples": samples, "results": results, "versions": {"a": 1.0}}
    monkeypatch.setattr(harness, "run", lambda *_: found)
    monkeypatch.setattr(harness, "refuse_scalar_head", lambda *_: None)
    monkeypatch.setattr(harness, "version", lambda _: "9.9")
    scored = harness.evaluate(a_subject(), config("evaluate.tasks=[a,b]", "evaluate.fewshot=2"), None)
    assert scored.scores.values() == {"a/acc": 0.5, "b/acc": 1.0, "a/f1": 0.9, "a/odd": 3.0}
    assert scored.scores.columns["a/acc"].tolist() == [0, 1, 0, 1, 0]
    assert scored.scores.columns["a/documents"].tolist() == [1, 1, 1, 1, 0]
    assert scored.scores.whole == {"a/f1": 0.9, "a/odd": 3.0}
    assert scored.scores.texts == {"task": ["a", "a", "a", "a", "b"]}
    assert scored.data == {"documents of a": 4, "documents of b": 1}
    assert scored.settings["tasks"] == {"a": 1.0, "b": None}
    assert (scored.settings["harness"], scored.settings["fewshot"]) == ("9.9", 2)
    found["results"] = {"a": {"f1,none": 0.9}}
    assert (
        harness.evaluate(a_subject(), config("evaluate.tasks=[a]"), None).scores.columns["documents"].tolist()
        == [1] * 5
    )
    assert [harness._number(v) for v in (True, 2, np.float32(0.5), "x", None)] == [1.0, 2.0, 0.5, None, None]


# The session


def test_an_evaluation_runs_here_or_on_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    code = [0]
    monkeypatch.setattr(session.ranks, "find", lambda: None)
    monkeypatch.setattr(session, "evaluate", lambda config: calls.append("here") or 0)
    monkeypatch.setattr(session.devices, "resolve_auto", lambda config: calls.append("auto"))
    launched = lambda module, config, folder, number: calls.append(number) or code[0]  # noqa: E731
    monkeypatch.setattr(session.launch, "launch_ranks", launched)
    run = ["run_dir=x", "data=text", "data.path=a"]
    for word, seen in (("auto", ["here"]), ("1", ["here"]), ("3", ["auto", 3])):
        assert session.start(config(*run, f"trainer.devices={word}")) == 0
        assert calls == seen
        calls.clear()
    with pytest.raises(UserError, match="one command per node"):
        session.start(config(*run, "trainer.num_nodes=2"))
    with pytest.raises(UserError, match="holds a whole model on each device"):
        session.start(config(*run, "trainer.strategy=fsdp"))
    for returned, ended in ((1, 1), (2, 2), (-signal.SIGTERM, FAILED)):
        code[0] = returned
        assert session.start(config(*run, "trainer.devices=2", "trainer.strategy=ddp")) == ended
    code[0] = -signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        session.start(config(*run, "trainer.devices=2"))
    monkeypatch.setattr(session.ranks, "find", lambda: "a layout")
    monkeypatch.setattr(session, "place", lambda config, layout: calls.append(layout))
    monkeypatch.setattr(session, "_as_rank", lambda config: 7)
    calls.clear()
    assert session.start(config(*run)) == 7
    assert calls == ["a layout"]


def test_the_data_of_a_runs_own_config_is_trusted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Path] = []
    monkeypatch.setattr(session.trust, "refuse_addresses", lambda data, file: refused.append(file))
    monkeypatch.setattr(session.rules, "load", lambda file, grants: SimpleNamespace(data=json.loads(file.read_text())))
    (tmp_path / "lmtrain_config.yaml").write_text("{}")
    session._refuse_addresses(config(f"run_dir={tmp_path}"))
    assert refused == [tmp_path / "lmtrain_config.yaml"]
    refused.clear()
    session._refuse_addresses(config(f"run_dir={tmp_path}", "evaluate.tasks=[a]"))
    session._refuse_addresses(config(f"run_dir={tmp_path}", "data=text", "data.path=a"))
    session._refuse_addresses(config(f"run_dir={tmp_path / 'none'}"))
    assert refused == []
