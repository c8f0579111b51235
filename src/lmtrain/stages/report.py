"""The plan of a pipeline before it begins, and its report: what each stage was and scored, side by side."""

import io
import json
import math
from html import escape
from pathlib import Path
from typing import Any

from lmtrain import terminal
from lmtrain.errors import UserError
from lmtrain.files import read_regular, write_atomic
from lmtrain.reports.report_page import as_text, asset, document, table
from lmtrain.run_folder.folder import RunDir
from lmtrain.secrets import shown
from lmtrain.stages.plan import PipelinePlan, PlannedStage
from lmtrain.stages.state import State

Row = list[str]


def show_plan(plan: PipelinePlan, statuses: dict[str, str]) -> None:
    """Prints what each stage is, on what data and whether it will run; keeps it as plan.txt."""
    what = _table(
        f"pipeline {plan.pipeline.name} in {plan.folder}",
        ["stage", "what happens", "objective", "model", "data"],
        [_what(one, statuses[one.name]) for one in plan.stages],
    )
    much = _table(
        "how much",
        ["stage", "rows (train, val)", "steps x rows"],
        [_how_much(one) for one in plan.stages],
    )
    lines = [f"evaluation {e.name}: {', '.join(e.of)}" for e in plan.pipeline.evaluations]
    text = io.StringIO()
    for console in (terminal.console(), terminal.console(file=text, width=160)):
        console.print(what, much)
        for line in lines:
            console.print(line, markup=False, highlight=False)
    write_atomic(plan.folder / "plan.txt", text.getvalue())


def _what(one: PlannedStage, status: str) -> Row:
    c = one.config
    begins = list(one.stage.needs)
    model = (
        f"of {', '.join(begins)}"
        if c.model.init == "pretrained" and begins
        else str(getattr(c.model, "name_or_path", None) or c.model.name)
    )
    data = Path(str(c.data.path)).name if c.data.path else str(c.data.name or c.data.source)
    what = f"{c.objective.name}, {c.peft.method}" if c.peft.method != "none" else c.objective.name
    return [one.name, status, what, *map(shown, (model, data))]


def _how_much(one: PlannedStage) -> Row:
    t = one.config.trainer
    steps = f"{t.max_steps:,}" if t.max_steps is not None else f"{t.max_epochs} epochs"
    counted = " and ".join(f"{one.rows[name]:,}" for name in ("train", "val") if name in one.rows)
    return [one.name, counted, f"{steps} x {one.config.data.global_batch_size}"]


def _table(title: str, header: list[str], rows: list[Row]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def write(plan: PipelinePlan, state: State) -> Path:
    """Prints the tables and writes report.html and report.json; returns the first."""
    stages, scores = _stages(plan, state), _scores(plan)
    names = [one.name for one in plan.stages]
    console = terminal.console()
    console.print(_table("stages", ["stage", "status", "steps", "tokens", "val/loss", "minutes"], stages))
    cells = [[what, score, *(_number(found.get(name)) for name in names)] for (what, score), found in scores.items()]
    if cells:
        console.print(_table("scores of what each exported", ["evaluation", "score", *names], cells))
    page = plan.folder / "report.html"
    write_atomic(page, _page(plan, stages, names, cells))
    tree = {f"{what}/{score}": found for (what, score), found in scores.items()}
    write_atomic(plan.folder / "report.json", json.dumps({"stages": names, "scores": tree}, indent=2) + "\n")
    console.print(f"written: {page}", markup=False, highlight=False, soft_wrap=True)
    return page


def _stages(plan: PipelinePlan, state: State) -> list[Row]:
    rows = []
    for one in plan.stages:
        summary = RunDir(one.run).read_summary() or {}
        row = state.rows.get(one.name)
        minutes = f"{row.seconds / 60:.1f}" if row is not None else ""
        metrics = summary.get("metrics") or {}
        loss = metrics.get("val/loss", (summary.get("best_metric") or {}).get("val/loss"))
        tokens = summary.get("tokens")
        rows.append([one.name, str(summary.get("status", "")), f"{summary.get('step', 0):,}",
                     f"{tokens:,}" if isinstance(tokens, int) else "", _number(loss), minutes])  # fmt: skip
    return rows


def _scores(plan: PipelinePlan) -> dict[tuple[str, str], dict[str, float]]:
    """(evaluation, score) to the value of each stage."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for one in plan.evaluations:
        try:
            scores = json.loads(read_regular(one.file))["scores"]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{one.file} can't be read ({error}): remove it, and the same command scores again"
            ) from None
        for score, value in scores.items():
            found.setdefault((one.evaluation.name, str(score)), {})[one.of] = float(value)
    return found


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else ""


def _page(plan: PipelinePlan, stages: list[Row], names: list[str], scores: list[Row]) -> str:
    title = f"pipeline {plan.pipeline.name}"
    links = [
        f'<li><a href="{escape(name)}/report.html">{escape(name)}</a>: curves, samples, settings</li>' for name in names
    ]
    body = [
        f"<h1>{as_text(title)}</h1>",
        "<h2>Scores of what each stage exported</h2>",
        table(["evaluation", "score", *names], scores),
        "<h2>Stages</h2>",
        table(["stage", "status", "steps", "tokens", "val/loss", "minutes"], stages),
        f"<ul>{''.join(links)}</ul>",
    ]
    return document(title, asset("report.css"), body)
