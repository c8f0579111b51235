"""The printed plan of a pipeline before it begins, and its report, which compares the stages and their scores."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text
from safetensors import safe_open

from lmtrain import terminal
from lmtrain.data.chat.turns import is_exact
from lmtrain.errors import UserError
from lmtrain.files import read_jsonl, read_regular, strict_json, write_atomic
from lmtrain.reports import listing, report_page
from lmtrain.reports.curves import charts
from lmtrain.run_folder.folder import RunDir
from lmtrain.secrets import shown
from lmtrain.stages.plan import PipelinePlan, PlannedStage
from lmtrain.stages.state import State

Row = list[str]
Score = tuple[float, float | None]  # a value and its standard error
Answers = dict[str, dict[str, list[dict[str, Any]]]]  # rows by evaluation, whose prompts its stages share, and stage
_STAGES = ["stage", "status", "steps", "tokens", "best", "time"]
_ANSWERS = 6  # prompts whose answers are shown side by side; one where a single stage answers
_SHORT = 160  # characters of a prompt or a reference that is shown unfolded
_NORMAL = 1.96  # standard errors from a mean to the end of its 95 % interval


def show_plan(plan: PipelinePlan, statuses: dict[str, str]) -> None:
    """Prints each stage's objective, model, data and whether it will run, and writes the same to plan.txt."""
    what = _table(
        f"pipeline {plan.pipeline.name} in {plan.folder}",
        ["stage", "what happens", "objective", "model", "data"],
        [_what(one, statuses[one.name]) for one in plan.stages],
    )
    much = _table("how much", ["stage", "rows (train, val)", "steps x rows"], [_how_much(one) for one in plan.stages])
    lines = [f"evaluation {e.name}: {', '.join(e.of)}" for e in plan.pipeline.evaluations]
    text = io.StringIO()
    for console in (terminal.console(), terminal.console(file=text, width=160)):
        console.print(what, much)
        for line in lines:
            console.print(line, markup=False, highlight=False)
    write_atomic(plan.folder / "plan.txt", text.getvalue())


def _what(one: PlannedStage, status: str) -> Row:
    c = one.config
    model = str(getattr(c.model, "name_or_path", None) or c.model.name)
    if c.model.init == "pretrained" and one.stage.needs:
        model = f"of {', '.join(one.stage.needs)}"
    data = Path(str(c.data.path)).name if c.data.path else str(c.data.name or c.data.source.rpartition(".")[2])
    what = f"{c.objective.name}, {c.peft.method}" if c.peft.method != "none" else c.objective.name
    return [one.name, status, what, *map(shown, (model, data))]


def _how_much(one: PlannedStage) -> Row:
    t = one.config.trainer
    steps = f"{t.max_steps:,}" if t.max_steps is not None else f"{t.max_epochs} epochs"
    counted = " and ".join(f"{one.rows[name]:,}" for name in ("train", "val") if name in one.rows)
    return [one.name, counted, f"{steps} x {one.config.data.global_batch_size}"]


def _table(title: str, header: list[str], rows: list[Row]) -> Table:
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def write(plan: PipelinePlan, state: State) -> None:
    """Prints the tables and writes report.html and report.json."""
    scores, names = _scores(plan), [one.name for one in plan.stages]
    console = terminal.console()
    console.print(_table("stages", _STAGES, _stages(plan, state)))
    if rows := _rows_of(scores, names):
        title = "scores of each stage's exported model, with standard errors for scores that are means over rows"
        console.print(_table(title, ["evaluation", "score", *names], rows))
    console.print(f"total time: {terminal.time_in_words(_seconds(state))}", highlight=False)
    named = {f"{what}/{score}": found for (what, score), found in scores.items()}
    tree = {key: {name: value for name, (value, _) in found.items()} for key, found in named.items()}
    errors = {key: {name: e for name, (_, e) in found.items() if e is not None} for key, found in named.items()}
    written = {"stages": names, "scores": tree, "standard_errors": errors, "seconds": _seconds(state)}
    write_atomic(plan.folder / "report.json", strict_json(written, indent=2) + "\n")
    console.print(f"written: {write_page(plan, state)}", markup=False, highlight=False, soft_wrap=True)


def write_page(plan: PipelinePlan, state: State) -> Path:
    """Writes report.html with what the stages have written so far, and returns its path."""
    page = plan.folder / "report.html"
    rows = _rows_of(_scores(plan), [one.name for one in plan.stages])
    write_atomic(page, _page(plan, state, _stages(plan, state), rows))
    return page


def _rows_of(scores: dict[tuple[str, str], dict[str, Score]], names: list[str]) -> list[Row]:
    return [[what, score, *(_with_error(of.get(name)) for name in names)] for (what, score), of in scores.items()]


def _stages(plan: PipelinePlan, state: State) -> list[Row]:
    rows = []
    for one in plan.stages:
        run = RunDir(one.run)
        summary = run.read_summary() or {}
        row = state.rows.get(one.name)
        seconds = terminal.time_in_words(row.seconds) if row is not None else ""
        tokens = summary.get("tokens")
        rows.append([one.name, str(summary.get("status", "")), f"{summary.get('step', 0):,}",
                     f"{tokens:,}" if isinstance(tokens, int) else "", _best(one, run, summary), seconds])  # fmt: skip
    return rows


def _best(one: PlannedStage, run: RunDir, summary: dict[str, Any]) -> str:
    """Returns name and value of the best checkpoint's score that the stage's objective puts first: a reward of GRPO."""
    monitor, mode = one.config.checkpoint.monitor, one.config.checkpoint.mode
    best = listing.best_row(run, summary, monitor, mode)
    if best is None:
        return ""
    name, value = listing.lead(best, listing.headline(run, summary))
    return f"{name} {value:.4f}"


def _seconds(state: State) -> float:
    """Returns the seconds that all stages and evaluations have taken, over all starts."""
    return round(sum(row.seconds for row in state.rows.values()), 1)


def _scores(plan: PipelinePlan) -> dict[tuple[str, str], dict[str, Score]]:
    """Returns, for each (evaluation, score), the value of each stage and its standard error."""
    found: dict[tuple[str, str], dict[str, Score]] = {}
    for one in plan.evaluations:
        try:
            tree = json.loads(read_regular(one.file))
            scores, intervals = tree["scores"], tree.get("intervals_95", {})
            for score, value in scores.items():
                low, high = intervals.get(score, (None, None))
                error = None if low is None else (float(high) - float(low)) / (2 * _NORMAL)
                found.setdefault((one.evaluation.name, str(score)), {})[one.of] = (float(value), error)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{one.file} can't be read ({error}): remove it; the same command scores again") from None
    return found


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else ""


def _with_error(score: Score | None) -> str:
    """Formats a score with its standard error, as in 0.4312 ± 0.0087."""
    value, error = score or (None, None)
    return f"{_number(value)} ± {_number(error)}" if _number(error) else _number(value)


def _page(plan: PipelinePlan, state: State, stages: list[Row], scores: list[Row]) -> str:
    names = [one.name for one in plan.stages]
    charts = _curves(plan)
    answers = _written(plan)
    title = f"pipeline {plan.pipeline.name}"
    body = report_page.rendered(
        "pipeline.html",
        title=title,
        names=names,
        facts=_facts(plan, state, stages, answers),
        prompts=_side_by_side(answers),
        by_first_word=_by_first_word(answers, names),
        scores=scores,
        charts=charts,
        header=_STAGES,
        stages=stages,
    )
    return report_page.document(title, body, charts or None)


def _facts(plan: PipelinePlan, state: State, stages: list[Row], answers: Answers) -> list[tuple[str, str]]:
    """Returns the numbers at the top: right answers or the loss of the last stage, time, parameters."""
    last = plan.stages[-1]
    score, _, value = stages[-1][4].rpartition(" ")
    facts = [(value, f"{score} of {last.name}") if value else (stages[-1][1], last.name)]
    for name, of in answers.items():
        stage, rows = list(of.items())[-1]
        if any(map(_right, rows)):
            facts = [(f"{sum(map(_right, rows)) / len(rows):.1%}", f"of {len(rows)} {name} right after {stage}")]
    facts += [(terminal.time_in_words(_seconds(state)), "total time")]
    weights = last.export / "model.safetensors"
    if weights.is_file():
        with safe_open(str(weights), "np") as file:
            count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        facts += [(f"{count:,}", "parameters")]
    return facts


def _curves(plan: PipelinePlan) -> dict[str, list[dict[str, Any]]]:
    """Returns the curves of each stage's main numbers, such as a loss, a reward or an accuracy."""
    found = {}
    for one in plan.stages:
        run = RunDir(one.run)
        drawn = charts(read_jsonl(run.metrics))
        for chart in listing.headline(run, run.summary_or_error()):
            if chart in drawn:
                found[f"{one.name}: {chart}"] = [report_page.line_of(c, c.name, i) for i, c in enumerate(drawn[chart])]
    return found


def _written(plan: PipelinePlan) -> Answers:
    """Returns the rows of evaluations that write answers."""
    found: Answers = {}
    for one in plan.evaluations:
        file = one.file.with_name(f"{one.file.stem}.rows.jsonl")
        written = [row for row in read_jsonl(file) if isinstance(row.get("answer"), str)]
        if written:
            found.setdefault(one.evaluation.name, {})[one.of] = written
    return found


def _right(row: dict[str, Any]) -> bool:
    return is_exact(row["answer"], row.get("reference"))


def _side_by_side(answers: Answers) -> list[dict[str, Any]]:
    """Returns prompts with each stage's answer, whether it is right, None if no answer of the evaluation is, and cut.

    What several stages answer comes first. Of a long prompt, the question at its end is apart from what it is about.
    """
    found = []
    for of in sorted(answers.values(), key=len, reverse=True):
        exact = any(_right(row) for rows in of.values() for row in rows)
        for asked in list(zip(*of.values(), strict=False))[: _ANSWERS if len(of) > 1 else 1]:
            shown = [
                (name, row["answer"], _right(row) if exact else None, bool(row.get("cut_off")))
                for name, row in zip(of, asked, strict=True)
            ]
            question, about = _split(str(asked[0].get("prompt")))
            reference = str(asked[0].get("reference") or "")
            short = len(reference) <= _SHORT
            given = {"question": question, "about": about, "reference": reference, "short": short}
            found.append({**given, "answers": shown})
    return found


def _split(prompt: str) -> tuple[str, str]:
    """Returns the question at the end of a prompt and what stands before it; a short prompt is all question."""
    prompt = prompt.strip()
    if len(prompt) <= _SHORT and "\n" not in prompt:
        return prompt, ""
    begins = max((found.end() for found in re.finditer(r"\n|[.!?]\W?\s", prompt)), default=0)
    about, question = prompt[:begins], prompt[begins:]
    if question.endswith("?") or ("\n" in about and len(question) <= _SHORT):
        return question, about.strip()
    return f"{prompt[:_SHORT].rpartition(' ')[0]} ...", prompt


def _by_first_word(answers: Answers, names: list[str]) -> dict[str, list[Row]]:
    """Returns, by evaluation, the share of exact answers for each kind of question: where, who, how many, and so on."""
    found = {}
    for name, of in answers.items():
        kinds: dict[str, dict[str, list[bool]]] = {}
        for stage, rows in of.items():
            for row in rows:
                words = str(row.get("prompt")).strip().rpartition("\n")[2].split()
                if words and words[-1].endswith("?"):
                    kinds.setdefault(words[0], {}).setdefault(stage, []).append(_right(row))
        if len(kinds) > 1 and any(any(right) for of_stage in kinds.values() for right in of_stage.values()):
            found[name] = [
                [f"{kind} ...?", str(max(map(len, of.values()))), *(_share(of.get(stage)) for stage in names)]
                for kind, of in sorted(kinds.items())
            ]
    return found


def _share(right: list[bool] | None) -> str:
    """Formats the share of right answers with its standard error, that of a binomial distribution."""
    if not right:
        return ""
    share = sum(right) / len(right)
    return f"{share:.1%} ± {math.sqrt(share * (1 - share) / len(right)):.1%}"
