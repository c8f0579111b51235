"""Reads a run's folder, finished or still being written, and writes its HTML report. Imports no torch."""

import contextlib
import functools
import json
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from lmtrain import errors, terminal
from lmtrain.adapters.exported import gives_rewards, predicts_masked_tokens
from lmtrain.config import compose as rules
from lmtrain.config.override_text import leaves_of, typed_keys
from lmtrain.errors import UserError
from lmtrain.exports.model_card import loading_code
from lmtrain.files import absolute, read_jsonl, read_regular, write_atomic
from lmtrain.reports import listing, report_page
from lmtrain.reports.curves import FIRST, charts, heat_maps
from lmtrain.reports.report_page import ReportedRun, ShownSample
from lmtrain.run_folder.cut_back import last_rows
from lmtrain.run_folder.folder import RunDir, checkpoint_names
from lmtrain.secrets import shown_in

_PROMPTS, _STEPS = 12, 15  # samples shown: number of prompts, and of steps for each, spread over the training
_SHARES = ("exact_match", "rewards/accuracy")  # metrics that are shown as percentages
# Keys of `data` that, with its path or name, decide on which rows a score is measured.
_MEASURED = ("val_path", "val_split", "val_fraction", "num_samples", "mixture")
# Keys that set locations or the behaviour of other commands; they do not describe what was trained.
_NOT_SHOWN = ("run_dir", "run.", "hydra.", "generate.", "evaluate.", "estimate.", "inspect.", "report.", "chat.",
              "sweep.", "data.cache_dir", "debug.")  # fmt: skip


def report(folders: list[Path], out: Path | None) -> int:
    """Writes the report to `out`, by default <run>/report.html, or ./report.html for several runs."""
    runs: list[RunDir] = []
    for folder in folders:
        found = [RunDir(run.path) for run in listing.runs_under(folder)]
        if not found:
            raise UserError(f"{folder} holds no run (a folder with config.yaml)")
        runs += found
    default = runs[0].report if len(runs) == 1 else absolute("report.html")
    print(terminal.visible(f"written: {write(runs, out or default)}"))
    return errors.FINISHED


def write_own(run: RunDir) -> None:
    """Writes <run>/report.html at the end of a run, when summary.json is complete but the run's lock is still held."""
    write_atomic(run.report, report_page.page([reported_run(run, ended=True)]))


def write(runs: list[RunDir], file: Path) -> Path:
    """Writes a page of one or several runs to `file`; RunError if that fails."""
    names = {run.path: run.path.name for run in runs}
    if len(set(names.values())) < len(names):  # runs of several sweeps: 0, 1, ... in each
        names = {path: str(Path(*path.parts[-2:])) for path in names}
    write_atomic(file, report_page.page([reported_run(run, names[run.path]) for run in runs]))
    return file


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Converts errors from processing `file` (such as valid JSON of another format) into a UserError that names it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{file} is not in the format that runs write ({error!r}): fix it or move it away") from None


def reported_run(run: RunDir, name: str | None = None, ended: bool = False) -> ReportedRun:
    """Collects the contents of a run's page; UserError if the folder is not a run's, or a file of it can't be read."""
    config, listed = shown_in(rules.read(run.config)), listing.read(run, ended)
    summary = dict(shown_in(run.summary_or_error()))
    # Each file is read by itself, so that a message names the one that can't be.
    with _reading(run.starts):
        history = _history(run, summary)
    with _reading(run.samples):
        samples = _samples(run)
    with _reading(run.metrics):
        clock = _clock(read_jsonl(run.metrics), [row["time"] for row in read_jsonl(run.starts) if "time" in row])
        drawn = charts(read_jsonl(run.metrics))
        maps = heat_maps(read_jsonl(run.metrics, holding=b'": ['))  # rows with a list
        rows = last_rows(run.metrics, 1 << 16)
    with _reading(run.config):
        trained = listing.trained(config)
        changed = _changed(config)
        typed = _typed(config, summary)
        for heat in maps:
            heat.about = _about_routing(config, heat.one)
        monitor = config.get("checkpoint", {}).get("monitor", "val/loss")
        higher = config.get("checkpoint", {}).get("mode") == "max"
    with _reading(run.summary):
        facts = _facts(trained, listed, summary, rows)
        names = listing.headline(run, summary)
        best = listing.best_row(run, summary, monitor, "max" if higher else "min")
        lead = [name for name in names if name != "bits_per_byte"] or ["loss"]  # whose curve has the loss's shape
        headline = _headline(best, lead, summary, rows)
        compared = what_is_compared(config, monitor, higher)
    objective, model, data = trained
    return ReportedRun(
        name=name or run.path.name,
        subtitle=f"{listed.status.replace('_', ' ')} at step {listed.steps()}: {objective}, {model} on {data}",
        headline=headline,
        typed=typed,
        facts=facts,
        changed=changed,
        charts=drawn,
        heat_maps=maps,
        samples=samples,
        evaluations=_evaluations(run),
        checkpoints=_checkpoints(run),
        history=history,
        how_to_use=_how_to_use(run, config.get("objective", {})),
        monitor=monitor,
        score=None if best is None else best[monitor],
        higher_is_better=higher,
        compared=compared,
        lead=lead,
        clock=clock,
    )


def _facts(
    trained: tuple[Any, Any, Any], listed: listing.Listed, summary: dict[str, Any], rows: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    objective, model, data = trained
    tokens = rows[-1].get("tokens_seen") if rows else None
    found = [
        ("status", listed.status),
        ("step", listed.steps()),
        ("best", listed.best),
        ("model", model),
        ("parameters", _parameters(summary)),
        ("objective", objective),
        ("data", str(data)),
        ("tokens seen", _number(tokens)),
        ("tokens/s", _number(summary.get("tokens_per_s"))),
        ("minutes", _number(summary["wall_seconds"] / 60) if summary.get("wall_seconds") else None),
        ("devices", summary.get("device")),
        ("precision", summary.get("precision")),
        ("command", summary.get("command")),
        ("commit", _commit(summary)),
        ("lmtrain", summary.get("versions", {}).get("lmtrain")),
        ("error", summary.get("error")),
    ]
    return [(name, str(value)) for name, value in found if value]


def _parameters(summary: dict[str, Any]) -> str:
    known = summary.get("speed_of", {})
    total, trained = (listing.whole(known.get(name)) for name in ("parameters", "trained"))
    if not total:
        return ""
    return f"{total:,}" if trained in (None, total) else f"{total:,}, of which {trained:,} are trained"


def _commit(summary: dict[str, Any]) -> str:
    git = summary.get("git")
    if not isinstance(git, dict):
        return ""
    return f"{git.get('commit')}{' with changes that are not committed' if git.get('dirty') else ''}"


def what_is_compared(config: dict[str, Any], monitor: str, higher: bool) -> str:
    """Describes what the score of a run measures: only scores with the same description are ranked."""
    objective, _, data = listing.trained(config)
    loss = config.get("objective", {}).get("loss")
    rows, tokenizer = config.get("data", {}), config.get("tokenizer", {})
    said = {key: rows.get(key) for key in _MEASURED}
    said["tokenizer"] = tokenizer.get("name_or_path") or tokenizer.get("kind")
    words = ", ".join(f"{key}={_words(value)}" for key, value in said.items() if value is not None)
    of = f"{objective} ({loss})" if loss else str(objective)
    return f"{monitor}, {'highest' if higher else 'lowest'} first: {of} on {data} ({words})"


def _headline(
    best: dict[str, Any] | None, names: list[str], summary: dict[str, Any], rows: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Returns the scores `names`, whose charts come first, tokens and time, as far as the folder has them."""
    found, last = list[tuple[str, str]](), {key: value for row in rows for key, value in row.items()}
    step = last.get("step", 0)
    if best is not None:
        wanted = [name for name in names if name != "loss"][:2] or ["loss"]
        for key, value in dict.fromkeys(listing.lead(best, [name, *names]) for name in wanted):
            bits = best.get("val/bits_per_byte") if key == "val/loss" else None
            too = f" ({_shown('', bits)} bits per byte)" if isinstance(bits, int | float) else ""
            found.append((_shown(key, value), f"{_title(key)} of the best checkpoint, step {best['step']:,}{too}"))
    else:
        trained = [key for key in (f"train/{name}" for name in (*names, "loss")) if key in last][:1]
        found += [(_shown(key, last[key]), f"{key} at step {step:,}") for key in trained]
    tokens = last.get("tokens_seen")
    if isinstance(tokens, int | float):
        short = terminal.si(tokens) if tokens >= 1e4 else f"{tokens:,.0f}"
        found.append((short, f"tokens trained in {step:,} steps"))
    seconds = summary.get("wall_seconds")
    if isinstance(seconds, int | float):
        speed = summary.get("tokens_per_s")
        found.append((terminal.time_in_words(seconds), f"at {_number(speed)} tokens/s" if speed else "wall time"))
    return found[:3]


def _shown(key: str, value: float) -> str:
    return f"{value:.1%}" if key.endswith(_SHARES) else f"{value:.4g}"


def _title(key: str) -> str:
    name = key.removeprefix("val/")
    return FIRST[name][0].lower() if name in FIRST and name != "loss" else key


def _clock(rows: Iterable[dict[str, Any]], starts: list[float]) -> list[tuple[int, int, float]]:
    """Returns (step, tokens seen, minutes of training) of about 300 rows; the time between two starts is left out."""
    found = list[tuple[int, int, float]]()
    idle = 0.0
    last = 0.0
    for row in rows:
        if not isinstance(now := row.get("time"), int | float) or "tokens_seen" not in row:
            continue
        while starts and starts[0] <= now:
            idle, last = idle + starts[0] - last, starts.pop(0)
        found.append((int(row["step"]), int(row["tokens_seen"]), round((now - idle) / 60, 3)))
        last = now
        found = found[::2] if len(found) >= 600 else found
    return found


def _typed(config: dict[str, Any], summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (key, value, default) of the command line's overrides, except the keys of _NOT_SHOWN."""
    words = shlex.split(str(summary.get("command", "")))[3:]
    defaults, leaves = _defaults(), dict(leaves_of(config))
    found = []
    for key, value in typed_keys([word for word in words if "=" in word]).items():
        if not key.startswith(_NOT_SHOWN):
            now = _words(leaves[key]) if key in leaves else value
            found.append((key, now, _words(defaults[key]) if key in defaults else ""))
    return found


def _about_routing(config: dict[str, Any], one: str) -> str:
    """Describes the model and how many chapters or experts each token chooses."""
    _, model, _ = listing.trained(config)
    section, key = ("memory", "top_k") if one == "chapter" else ("model", "num_experts_per_tok")
    chosen = config.get(section, {}).get(key)
    return f"{model}, each token chooses {chosen} (top-k)" if chosen else str(model)


def _number(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and value >= 100 else f"{value:.3g}" if value else ""


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(leaves_of(yaml.safe_load(rules.to_yaml(rules.compose([])))))


def _changed(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns (key, default, value) where the run's config differs from that of `lmtrain.train` without overrides."""
    defaults = _defaults()
    pairs = [(key, defaults.get(key), value) for key, value in leaves_of(config) if not key.startswith(_NOT_SHOWN)]
    return [(key, _words(default), _words(value)) for key, default, value in pairs if default != value]


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _samples(run: RunDir) -> dict[str, list[ShownSample]]:
    found: dict[str, list[ShownSample]] = {}
    for row in read_jsonl(run.samples):
        prompt, step = str(row.get("prompt", "")), listing.whole(row.get("step"))
        if step is None:
            continue  # not a sample written by lmtrain
        reward, reference = row.get("reward"), row.get("reference")
        notes = [f"reward {reward}"] if reward is not None else []
        notes += [str(row["reading"])] if "reading" in row else []
        # Prompts of rollouts differ from step to step.
        heading = prompt if reward is None else f"{row.get('which')} completion of a rollout"
        if heading in found or len(found) < _PROMPTS:
            is_answer = bool(row.get("is_answer")) or reward is not None
            notes += ["cut off: it had used up its tokens"] if row.get("cut_off") else []
            sample = ShownSample(step, prompt, str(row.get("text", "")), reference, is_answer, notes)
            found.setdefault(heading, []).append(sample)
    return {heading: _spread(texts) for heading, texts in found.items()}


def _spread(texts: list[ShownSample]) -> list[ShownSample]:
    """Returns at most _STEPS evenly spaced ones, including the first and the last."""
    if len(texts) <= _STEPS:
        return texts
    return [texts[i * (len(texts) - 1) // (_STEPS - 1)] for i in range(_STEPS)]


def _evaluations(run: RunDir) -> list[tuple[str, dict[str, float]]]:
    found = []
    for file in sorted((run.path / "evaluations").glob("*.json")):
        try:
            scores = json.loads(read_regular(file))["scores"]
            found.append((file.stem, {str(k): float(v) for k, v in scores.items()}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # not an evaluation written by lmtrain
    return found


def _checkpoints(run: RunDir) -> list[tuple[str, str]]:
    links: dict[str, list[str]] = {}
    for link in ("best", "last"):
        path = run.checkpoints / link
        if path.exists():
            links.setdefault(path.resolve().name, []).append(link)
    found = []
    for name in sorted(checkpoint_names(run.checkpoints)):
        size = sum(p.stat().st_size for p in (run.checkpoints / name).rglob("*") if p.is_file())
        found.append((" ".join([name, *(f"({link})" for link in links.get(name, []))]), f"{size / 1e6:,.1f} MB"))
    return found


def _history(run: RunDir, summary: dict[str, Any]) -> list[str]:
    """Returns lines that say when training started and resumed, and how it ended."""
    lines = []
    for i, row in enumerate(read_jsonl(run.starts)):
        try:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(row["time"])))
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            continue  # not a start written by lmtrain
        began, step = "restarted" if i else "began", listing.whole(row.get("step"))
        lines.append(f"{moment}: resumed from step {step:,}" if step else f"{moment}: {began}")
    if summary.get("status") and lines:
        step = listing.whole(summary.get("step")) or 0
        lines.append(f"{str(summary['status']).replace('_', ' ')} at step {step:,}")
    return lines


def _how_to_use(run: RunDir, objective: dict[str, Any]) -> list[str]:
    here, verbs = shlex.quote(str(run.path)), ["chat", "generate", "evaluate"]
    # A run without an export is recognized by an option that only objectives of its kind have.
    if "center_rewards_coefficient" in objective or gives_rewards(run.export):
        verbs = ["evaluate"]
    elif "mask_token" in objective or predicts_masked_tokens(run.export):
        verbs = ["generate"]
    found = [f"python -m lmtrain.{verb} {here}" for verb in verbs]
    for folder in (run.export, run.export_merged):
        if folder.is_dir():
            found.append(loading_code(folder, f'"{folder}"'))
    return found
