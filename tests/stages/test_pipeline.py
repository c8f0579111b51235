"""Pipelines: what is refused before the first stage begins, and which stages run, are skipped or run again."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny, write

from inprocess import Ended, run
from lmtrain.config import compose
from lmtrain.config.trust import JUDGED, Foreign
from lmtrain.errors import UserError
from lmtrain.stages import definition, plan, report, state
from lmtrain.stages import run as stages
from support import REPO, thinned
from support import rows as read_rows

Tree = dict[str, dict]


@pytest.fixture(autouse=True, scope="module")
def _composed_once() -> Iterator[None]:
    """Caches composed configs by their overrides, so that those that tests share are composed only once."""
    with pytest.MonkeyPatch.context() as patch:
        composes = compose.compose
        remembered = functools.cache(lambda words, folder, foreign: composes(list(words), folder, foreign=foreign))

        def kept(words: list[str], folder: str | None = None, *_: str, foreign: Foreign | None = None) -> object:
            as_key = foreign if foreign in (None, JUDGED) else Foreign(foreign.file, tuple(foreign.typed))
            return remembered(tuple(words), folder, as_key)

        patch.setattr(compose, "compose", kept)
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture
def tree(corpus: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.chdir(tmp_path)
    return tiny(corpus, rows)


def refused(tree: Tree, *argv: str) -> str:
    """Returns the single message of a pipeline that is refused before any stage is started."""
    ended = run("pipeline", f"pipeline={write(tree, Path.cwd())}", *argv)
    assert ended.code == 2, ended.out
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert not Path("outputs").exists()
    return ended.err.removeprefix("error: ").strip()


def planned(tree: Tree, *argv: str) -> plan.PipelinePlan:
    file = write(tree, Path.cwd())
    pipeline = definition.read(file)
    return plan.make(pipeline, definition.sort([f"pipeline={file}", *argv], pipeline), None)


@pytest.mark.parametrize("path", sorted((REPO / "conf" / "pipeline").glob("*.yaml")), ids=lambda path: path.stem)
def test_pipelines_that_come_with_lmtrain_compose(path: Path) -> None:
    ended = run("pipeline", f"pipeline={path.stem}", "--cfg")
    assert ended.code == 0, ended.err
    named = definition.read(path)
    assert [line.split()[2].strip(",") for line in ended.out.splitlines() if line.startswith("# stage")] == [
        stage.name for stage in named.stages
    ]
    assert named.evaluations


def test_a_stage_that_needs_what_is_not_there(tree: Tree) -> None:
    tree["stages"]["dpo"]["needs"] = ["stf"]
    assert "stage dpo needs stf, which is not a stage; did you mean sft? (pretrain, sft, dpo)" in refused(tree)


def test_a_stage_that_needs_itself(tree: Tree) -> None:
    tree["stages"]["sft"]["overrides"].append("model.name_or_path=${stage.sft.export}")
    assert "stage sft needs itself" in refused(tree)


def test_stages_in_a_circle(tree: Tree) -> None:
    tree["stages"]["pretrain"]["needs"] = ["dpo"]
    found = refused(tree)
    assert found.startswith("stages need one another in a circle: ")
    assert all(f"{name} needs" in found for name in ("pretrain", "sft", "dpo"))


def test_stages_run_in_the_written_order_unless_they_need_a_later_one(tmp_path: Path) -> None:
    needs = {"early": ["late"], "one": [], "two": ["one"], "three": [], "late": [], "four": ["two", "early"]}
    file = write({"stages": {name: {"needs": needed} for name, needed in needs.items()}}, tmp_path)
    assert [stage.name for stage in definition.read(file).stages] == ["one", "two", "three", "late", "early", "four"]


def test_a_stage_needs_those_that_are_typed_for_it(tree: Tree) -> None:
    """It runs again if one of them changes what it exports; stages run in order, so none can be a later one."""
    tree["stages"] = {"other": tree["stages"]["pretrain"], **tree["stages"]}
    made = planned(tree, "sft.model.name_or_path=${stage.other.export}")
    sft = next(one for one in made.stages if one.name == "sft")
    assert sft.stage.needs == ("pretrain", "other")
    first, second = (made.identity(sft, {"pretrain": "a", "other": digest}) for digest in "bc")
    assert first != second
    for name in ("sft", "dpo"):
        assert f"sft can't use stage {name}" in refused(tree, f"sft.model.name_or_path=${{stage.{name}.export}}")


def test_a_folder_that_no_stage_has(tree: Tree) -> None:
    tree["stages"]["sft"]["overrides"].append("model.name_or_path=${stage.pretrain.exprot}")
    assert "${stage.pretrain.exprot}: of a stage there are export, export_merged, run" in refused(tree)


WRONG = {
    "stage dpo: there is no key 'trainer.max_stepz'": ("dpo", "trainer.max_stepz=3"),
    "stage dpo: data.path=nowhere.jsonl: no such file": ("dpo", "data.path=nowhere.jsonl"),
    "stage dpo: objective=dpo needs pairs": ("dpo", "data=chat_jsonl"),
    "stage sft: data.seq_len=512 exceeds the 256 positions of the model that pretrain": ("sft", "data.seq_len=512"),
    "stage sft: the tokenizer that pretrain trains has no chat template": ("sft", "data.chat_template=null"),
    "stage sft: data.chat_template=chatml is made of tokens": ("sft", "data.chat_template=chatml"),
    "stage sft sets run.dir": ("sft", "run.dir=elsewhere"),
    "sft needs what pretrain exports": ("pretrain", "export.enabled=false"),
    "data.streaming has no effect": ("dpo", "data.streaming=true"),
    "evaluation answers: trainer.max_steps has no effect": ("answers", "trainer.max_steps=3"),
    "evaluation answers: there is no key 'evaluate.nothing'": ("answers", "evaluate.nothing=1"),
}  # fmt: skip


@pytest.mark.parametrize("message", thinned(WRONG, 2))
def test_mistakes_of_a_later_stage_are_found_before_the_first(tree: Tree, message: str) -> None:
    stage, word = WRONG[message]
    assert message in refused(tree, f"{stage}.{word}")


def test_a_bad_row_of_a_later_stage_is_found_before_the_first(tree: Tree) -> None:
    file = Path.cwd() / "bad.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    assert f"stage dpo: {file}, line 1: no format of pairs fits" in refused(tree, f"dpo.data.path={file}")


def test_an_adapter_is_not_taken_for_a_model(tree: Tree) -> None:
    found = refused(tree, "sft.peft=lora")
    assert "dpo: sft exports an adapter, not a model" in found
    assert "${stage.sft.export_merged}" in found


def test_unknown_pipelines() -> None:
    for argv, message in {
        ("pipeline=labtop",): "did you mean laptop?",
        ("run.name=a",): "which pipeline? pipeline=laptop needs no network",
        ("pipeline=none.yaml",): "there is no such pipeline",
        ("pipeline=laptop", "stf.optimizer.lr=1e-4"): "there is no stage stf; did you mean sft? (pretrain, sft, ",
        ("pipeline=laptop", "optimizr.lr=1e-4"): "there is no key 'optimizr.lr'; did you mean optimizer.lr",
    }.items():
        ended = run("pipeline", *argv)
        assert (ended.code, message in ended.err) == (2, True), ended.err


def test_an_evaluation_may_read_the_address_that_was_typed_for_its_stage(tree: Tree) -> None:
    made = planned(tree, "pretrain.data.path='https://host/a.txt'")
    of_pretrain, of_sft = made.evaluations
    assert made.flags_of(of_pretrain) == ["--trust", str(made.folder / "pretrain" / "export" / "lmtrain_config.yaml")]
    assert made.flags_of(of_sft) == []


def test_words_go_where_they_belong(tree: Tree) -> None:
    made = planned(tree, "trainer.max_steps=7", "sft.trainer.max_steps=9", "run.name=here", "answers.evaluate.limit=3")
    assert [one.config.trainer.max_steps for one in made.stages] == [7, 9, 7]
    assert made.folder == Path.cwd() / "outputs" / "here"
    assert {one.config.evaluate.limit for one in made.evaluations} == {3}
    assert made.stages[1].config.model.name_or_path == str(made.folder / "pretrain" / "export")


def test_a_pipeline_takes_one_value_of_a_key(tree: Tree) -> None:
    assert "a pipeline takes one value of each key" in refused(tree, "-m", "sft.trainer.max_steps=1,2")
    assert "stage sft: trainer.max_steps=1,2: several values are a sweep" in refused(tree, "sft.trainer.max_steps=1,2")


def test_a_stage_with_another_budget_runs_again(tree: Tree) -> None:
    known = []
    for word in ("pretrain.seed=1337", "pretrain.budget.tokens=1e4", "pretrain.budget.tokens=2e4"):
        made = planned(tree, word)
        known.append(made.identity(made.stages[0], {}))
        of_file = any(w.startswith("trainer.max_steps=") for w in made.stages[0].words)
        assert of_file is ("budget" not in word), "a length in the file does not outrank a budget that was typed"
    assert len(set(known)) == 3


def test_what_a_stage_is_known_by(tree: Tree, tmp_path: Path) -> None:
    """It is known by its settings and inputs, not by display settings or the pipeline's folder."""
    exports = {"pretrain": "a", "sft": "b"}
    before = planned(tree)
    again = planned(tree, f"run.dir={tmp_path}/elsewhere", "trainer.num_threads=1", "callbacks.samples.top_k=3")
    changed = planned(tree, "sft.optimizer.lr=1e-4")
    for number, same in enumerate([True, False, True]):
        first, other = before.stages[number], again.stages[number]
        assert before.identity(first, exports) == again.identity(other, exports)
        assert (before.identity(first, exports) == changed.identity(changed.stages[number], exports)) is same
    assert before.identity(before.stages[1], exports) != before.identity(before.stages[1], {"pretrain": "c"})


class Verbs:
    """Replaces the processes of stages: they run in this process, which is faster."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.stopping = 0

    def __enter__(self) -> "Verbs":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, verb: str, argv: list[str], log: Path) -> int:
        name = next(w for w in argv if w.startswith(("run.dir=", "evaluate.name="))).rpartition("/")[2]
        self.ran.append(name.rpartition("=")[2])
        ended = run(verb, *argv)
        log.write_text(ended.out + ended.err)
        return ended.code


def test_skips_continues_and_runs_again(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs()
    del tree["stages"]["dpo"]  # test_pipeline_kills.py covers all three stages
    monkeypatch.setattr("lmtrain.stages.run.Work", lambda: verbs)

    def start(*argv: str) -> tuple[Ended, list[str]]:
        verbs.ran.clear()
        return run("pipeline", f"pipeline={write(tree, Path.cwd())}", *argv), list(verbs.ran)

    first, ran = start()
    assert first.code == 0, first.err
    assert ran == ["pretrain", "answers-pretrain", "sft", "answers-sft"]
    report = json.loads(Path("outputs/tiny/report.json").read_text())
    scores, errors = report["scores"], report["standard_errors"]
    assert scores["answers/loss"]["sft"] < scores["answers/loss"]["pretrain"]
    page = Path("outputs/tiny/report.html").read_text()
    rows = read_rows(Path("outputs/tiny/evaluations/answers-sft.rows.jsonl"))
    # Standard error of a ratio of sums, by the delta method (Cochran 1977, 6.4); the bootstrap of ten rows is near it.
    losses, tokens = (np.array([row[key] for row in rows]) for key in ("nll", "tokens"))
    spread = np.sqrt(np.sum((losses - scores["answers/loss"]["sft"] * tokens) ** 2)) / tokens.sum()
    assert errors["answers/loss"]["sft"] == pytest.approx(spread, rel=0.5)
    assert f"{scores['answers/loss']['sft']:.4f} ± {errors['answers/loss']['sft']:.4f}" in page
    assert page.count('<div class="beside">') == 2, "two prompts, answered by each stage"
    assert "pretrain: bits_per_byte" in page
    assert "sft: bits_per_byte" not in page
    assert report["seconds"] > 0
    assert all(f'href="{name}/report.html"' in page for name in tree["stages"])

    assert "how much" in Path("outputs/tiny/plan.txt").read_text()

    again, ran = start()
    assert (again.code, ran) == (0, [])
    assert again.out.count("finished: skipped") == 2

    changed, ran = start("sft.optimizer.lr=3e-4")
    assert (changed.code, ran) == (0, ["sft", "answers-sft"]), changed.err
    assert "stage sft has changed" in changed.out
    kept = Path("outputs/tiny/replaced")
    assert [p.name for p in kept.iterdir()] == ["sft_1"]
    assert (kept / "sft_1" / "export" / "model.safetensors").exists()


def test_only_answers_to_the_same_prompts_stand_side_by_side(tree: Tree) -> None:
    """Two evaluations of other data ask other prompts, also of a stage that both of them score."""
    tree["evaluations"]["more"] = {**tree["evaluations"]["answers"], "of": ["sft", "dpo"]}
    made = planned(tree)
    for one in made.evaluations:
        file = one.file.with_name(f"{one.file.stem}.rows.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": f"asked in {one.evaluation.name}", "answer": f"of {one.name}."}) + "\n")
    shown = report._side_by_side(report._written(made))
    for one, name, stages_ in zip(shown, ("answers", "more"), (("pretrain", "sft"), ("sft", "dpo")), strict=True):
        assert one["question"] == f"asked in {name}"
        assert one["answers"] == [(stage, f"of {name}-{stage}.", None, False) for stage in stages_]


def test_answers_that_equal_their_reference_are_marked_and_counted_by_question(tree: Tree) -> None:
    made = planned(tree)
    for one in made.evaluations:
        asked = [("Mia has a hat.\nWho has it?", "Mia."), ("Tom ran.\nWho ran?", "Tom."), ("Where is Mia?", "Here.")]
        said = ["Mia.", "Tom." if one.of == "sft" else "Mia.", "Who knows?"]
        rows = [{"prompt": p, "reference": r, "answer": a} for (p, r), a in zip(asked, said, strict=True)]
        file = one.file.with_name(f"{one.file.stem}.rows.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report._page(made, state.State(made.folder), [["dpo", "", "", "", "", ""]], [])
    assert [page.count(f'<div class="{kind}">') for kind in ("right", "wrong")] == [3, 3]
    assert "<b>66.7%</b><span>of 3 answers right after sft</span>" in page
    # The standard error of a share p of n rows is sqrt(p (1 - p) / n): of 1 in 2, 0.354.
    table = page[page.index("exact, by the question") :]
    for cell in ("Who ...?", "50.0% ± 35.4%", "100.0% ± 0.0%", "Where ...?", "0.0% ± 0.0%"):
        assert f">{cell}</td>" in table
    first = page[page.index("<h3>") : page.index("asked about")]  # the question leads, what it is about is folded
    assert first.startswith("<h3>Who has it?</h3>")
    assert "reference: Mia." in first
    assert "<h4>reference" not in page
    assert "hat" not in first


def test_a_stage_is_told_by_the_score_of_its_own_objective(tree: Tree) -> None:
    """The loss of policy gradients says nothing about the model: the reward does."""
    made = planned(tree)
    for one, names in zip(made.stages, (["bits_per_byte", "loss"], ["loss"], ["reward"]), strict=True):
        one.run.mkdir(parents=True)
        (one.run / "starts.jsonl").write_text(json.dumps({"time": 0.0, "step": 0, "headline": names}) + "\n")
        scores = {"val/loss": -0.25, "val/bits_per_byte": 1.5, "val/reward": 0.75}
        (one.run / "metrics.jsonl").write_text(json.dumps({"step": 4, **scores}) + "\n")
        (one.run / "summary.json").write_text(json.dumps({"status": "finished", "step": 4, "validation": scores}))
    rows = report._stages(made, state.State(made.folder))
    assert "val/loss" not in report._STAGES
    assert [row[4] for row in rows] == ["val/bits_per_byte 1.5000", "val/loss -0.2500", "val/reward 0.7500"]


@pytest.mark.parametrize(
    ("prompt", "question", "about"),
    [
        ("Who ran?", "Who ran?", ""),
        ("Tom ran.\nWho ran?", "Who ran?", "Tom ran."),
        (f"{'Tom ran. ' * 30}Who ran?", "Who ran?", ("Tom ran. " * 30).strip()),
        (f"{'Tom ran. ' * 30}", f"{('Tom ran. ' * 30)[:160].rpartition(' ')[0]} ...", ("Tom ran. " * 30).strip()),
    ],
)
def test_a_question_is_apart_from_what_it_is_about(prompt: str, question: str, about: str) -> None:
    assert report._split(prompt) == (question, about)


def test_a_stage_that_fails_ends_the_pipeline(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Verbs):
        def run(self, verb: str, argv: list[str], log: Path) -> int:
            log.write_text("step 1\nerror: the disk is full\n")
            return 1

    monkeypatch.setattr("lmtrain.stages.run.Work", Fails)
    ended = run("pipeline", f"pipeline={write(tree, Path.cwd())}")
    assert ended.code == 1
    assert "error: stage pretrain failed (exit code 1): the disk is full (all of it: " in ended.err


def test_a_folder_of_something_else_is_left_alone(tree: Tree) -> None:
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("")
    made = planned(tree, "run.dir=full")
    with pytest.raises(UserError, match="holds files that are not a pipeline's"):
        stages.run(made, [])


def test_state_that_was_damaged_is_said(tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text('{"sft": 1}')
    with pytest.raises(UserError, match="can't be read"):
        state.State(tmp_path)
