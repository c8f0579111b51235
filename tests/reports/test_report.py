"""`lmtrain.report`: the page of a run, written at its end and on demand, with the contents of the run's files."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
import yaml

from inprocess import message, run, train_tiny
from lmtrain.reports.curves import Curve, thinned
from lmtrain.reports.report import told, write_own
from lmtrain.run_folder import lock
from lmtrain.run_folder.folder import RunDir
from lmtrain.terminal import visible
from support import EXPORT, SAMPLES, rows

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Page(HTMLParser):
    """Collects a page's tags with their attributes, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.script = "", dict[str, str]()
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = (dict(attrs).get("id") or tag) if tag in ("script", "style") else self._in

    def handle_endtag(self, tag: str) -> None:
        self._in = "" if tag in ("script", "style") else self._in

    def handle_data(self, data: str) -> None:
        if self._in:
            self.script[self._in] = self.script.get(self._in, "") + data
        else:
            self.text += data


def assert_self_contained(page: Page) -> None:
    assert [tag for tag, _ in page.tags].count("script") == 3  # the curves, the clocks, and the code that draws them
    assert not [a for _, a in page.tags if {"src", "href", "action", "onerror", "onload"} & set(a)]
    assert "http" not in page.script["script"].replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in page.script["style"]


def test_a_run_ends_with_its_page(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, EXPORT, SAMPLES, f"run.dir={tmp_path / 'a'}", "optimizer.lr=0.01", "report.enabled=true")
    assert ended.code == 0, ended.err
    page = Page((tmp_path / "a" / "report.html").read_text())
    assert_self_contained(page)
    curves = json.loads(page.script["curves"])
    logged = [row for row in rows(tmp_path / "a" / "metrics.jsonl") if "train/loss" in row]
    loss = next(line for line in curves["loss"] if line["name"] == "train/loss")
    assert loss["x"] == [row["step"] for row in logged]
    assert loss["y"] == pytest.approx([row["train/loss"] for row in logged], rel=1e-5)
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "perplexity"} <= set(curves)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    first = page.text[: page.text.index("smoothing")]
    assert "finished at step 2 of 2: causal_lm, gpt_nano on" in first
    best = summary["best_scores"]["val/bits_per_byte"]
    assert best == next(
        r["val/bits_per_byte"] for r in rows(tmp_path / "a" / "metrics.jsonl") if "val/loss" in r and r["step"] == 2
    )
    for number in (f"{best:.4g}bits per byte of the best", str(summary["tokens"]), "2 steps"):
        assert number in first, number
    sample = rows(tmp_path / "a" / "samples.jsonl")[-1]
    newest = page.text[page.text.index("Newest sample, step 2") :]
    assert f"{visible(sample['prompt'])}{visible(sample['text'])}" in newest
    set_ = page.text[page.text.index("What was set") : page.text.index("keys that differ from the defaults")]
    assert "optimizer.lr0.01" in set_
    assert "trainer.accelerator" not in set_, "which nobody has typed"
    for words in ("optimizer.lr", "0.01", "step_00000002 (best) (last)", "AutoModelForCausalLM", ": began"):
        assert words in page.text, words
    assert "data.cache_dir" not in page.text
    assert train_tiny(corpus, f"run.dir={tmp_path / 'b'}").code == 0
    assert not (tmp_path / "b" / "report.html").exists()


def test_a_resumed_run_says_so_and_runs_are_compared(corpus: Path, tmp_path: Path) -> None:
    for name, more in (
        ("a", ["optimizer.lr=0.01", "report.enabled=true"]),
        ("b", ["optimizer.lr=0.00001", "model.hidden_size=16"]),
    ):
        assert train_tiny(corpus, SAMPLES, f"run.dir={tmp_path / name}", *more).code == 0
    more = ["optimizer.lr=0.01", "report.enabled=true", "trainer.max_steps=4", "run.resume=auto"]
    assert train_tiny(corpus, SAMPLES, f"run.dir={tmp_path / 'a'}", *more).code == 0
    assert "resumed from step 2" in Page((tmp_path / "a" / "report.html").read_text()).text
    ended = run(
        "report", f"run_dir={tmp_path / 'b'}", f"run_dir={tmp_path / 'a'}", "--out", str(tmp_path / "both.html")
    )
    assert ended.code == 0, ended.err
    page = Page((tmp_path / "both.html").read_text())
    assert_self_contained(page)
    names = {
        "a": "hidden_size=32, lr=0.01, max_steps=4",
        "b": "hidden_size=16, lr=1e-05, max_steps=2",
    }  # what was typed and differs
    drawn = {line["name"] for line in json.loads(page.script["curves"])["loss"]}
    assert {f"{name}: train/loss" for name in names.values()} <= drawn
    clock = json.loads(page.script["clocks"])[names["a"]]
    logged = [row for row in rows(tmp_path / "a" / "metrics.jsonl") if "tokens_seen" in row]
    assert [(step, tokens) for step, tokens, _ in clock] == [(row["step"], row["tokens_seen"]) for row in logged]
    starts = [row["time"] for row in rows(tmp_path / "a" / "starts.jsonl")]
    idle = starts[1] - max(row["time"] for row in logged if row["time"] < starts[1])
    assert clock[-1][2] == pytest.approx((logged[-1]["time"] - starts[0] - idle) / 60, abs=2e-3)
    prompt = rows(tmp_path / "a" / "samples.jsonl")[-1]["prompt"]
    assert page.text.count(visible(prompt)) >= 3, "the prompt, and its continuations side by side"
    table = page.text[page.text.index("Outcome") :]
    assert table.index("4 of 4") < table.index("2 of 2")  # the better run comes first
    assert "model.hidden_size" in page.text
    assert "data.path" not in page.text  # the same in both runs


def test_runs_are_ranked_among_those_that_measure_the_same(tmp_path: Path) -> None:
    """A DPO loss below a text's loss is no better, a higher accuracy is, and the order typed changes nothing."""
    runs = {
        "text_a": ("causal_lm", "book.txt", "val/loss", "min", 5.4),
        "text_b": ("causal_lm", "book.txt", "val/loss", "min", 5.2),
        "other_text": ("causal_lm", "b.txt", "val/loss", "min", 1.0),
        "dpo": ("dpo", "pairs.jsonl", "val/loss", "min", 0.687),
        "dpo_a": ("dpo", "pairs.jsonl", "val/rewards/accuracy", "max", 0.6),
        "dpo_b": ("dpo", "pairs.jsonl", "val/rewards/accuracy", "max", 0.9),
    }  # fmt: skip
    for name, (objective, path, monitor, mode, score) in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps(
            {"objective": {"name": objective}, "data": {"path": path}, "model": {"name": "m"},
             "checkpoint": {"monitor": monitor, "mode": mode}}))  # fmt: skip
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 2, monitor: score}) + "\n")
    texts = []
    for names in (list(runs), list(reversed(runs))):
        assert run("report", *[str(tmp_path / name) for name in names], "--out", str(tmp_path / "all.html")).code == 0
        texts.append((tmp_path / "all.html").read_text())
    assert texts[0] == texts[1]
    page = Page(texts[0]).text
    tables = page[page.index("best first") : page.index("smoothing")].split("first: ")[1:]
    found = [[name for name in sorted(runs, key=table.find) if f"{name}interrupted" in table] for table in tables]
    assert sorted(found) == [["dpo"], ["dpo_b", "dpo_a"], ["other_text"], ["text_b", "text_a"]]


@pytest.mark.parametrize(("status", "head"), [("finished", "3,105 of 3,105"), ("preempted", "3,105:")])
def test_a_run_that_the_clock_ended_has_no_other_length(status: str, head: str, tmp_path: Path) -> None:
    """Its config's trainer.max_steps is only the first estimate; and it writes its page while it is still locked."""
    (tmp_path / "config.yaml").write_text("{trainer: {max_steps: 2064}, budget: {minutes: 3}}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3105, "train/loss": 2.5}\n')
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "step": 3105}))
    with lock.held(tmp_path):
        write_own(RunDir(tmp_path))
    text = Page((tmp_path / "report.html").read_text()).text
    assert f"{status} at step {head}" in text
    assert "2,064" not in text[: text.index("smoothing")]


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    """Writes a run of 20,000 steps with one spike, and samples that look like markup."""
    folder = tmp_path / "long"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {name: '<script>x</script>'}\ncheckpoint: {monitor: val/loss}\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            loss = 99.0 if step == 7_777 else None if step == 3 else 3 + math.sin(step) / 10
            row = {
                "step": step,
                "train/loss": loss,
                "lr": 1 / step,
                "grad_norm": 1.0,
                "tokens_per_s": 1000.5 + step % 7,
            }
            file.write(json.dumps(row) + "\n")
            if step % 100 == 0:
                file.write(json.dumps({"step": step, "val/loss": 3.1, f"val/{HOSTILE}": 1.0}) + "\n")
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(100, 20_001, 100):
            file.write(json.dumps({"step": step, "prompt": HOSTILE, "text": HOSTILE * 90, "reference": HOSTILE}) + "\n")
    return folder


def test_a_folder_with_a_comma_and_brackets_is_one_run(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a,b [1]"
    ended = train_tiny(corpus, f'run.dir="{folder}"', "report.enabled=false")
    assert ended.code == 0, ended.err
    assert run("report", str(folder)).code == 0
    assert (folder / "report.html").exists()


def test_a_model_of_masked_tokens_is_not_offered_a_chat(corpus: Path, tmp_path: Path) -> None:
    """Also without an export, which says what the model is."""
    words = ["objective=mdlm", "model=llama_nano", "tokenizer.add_tokens=[HIDDEN]", "objective.mask_token=HIDDEN"]
    assert train_tiny(corpus, *words, "trainer.max_steps=1", f"run.dir={tmp_path}/run").code == 0
    assert told(RunDir(tmp_path / "run")).how_to_use == [f"python -m lmtrain.generate {tmp_path}/run"]


def test_a_long_run_is_small_and_hostile_samples_are_text(long_run: Path) -> None:
    ended = run("report", f"run_dir={long_run}")
    assert ended.code == 0, ended.err
    text = (long_run / "report.html").read_text()
    assert len(text.encode()) < 3_000_000
    page = Page(text)
    assert_self_contained(page)
    assert HOSTILE in page.text
    assert "<script>x</script>" in page.text
    loss = next(line for line in json.loads(page.script["curves"])["loss"] if line["name"] == "train/loss")
    assert len(loss["x"]) < 2_000
    assert loss["y"][loss["x"].index(7_777)] == 99.0
    assert (loss["x"][0], loss["x"][-1]) == (1, 20_000)


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_a_browser_draws_it(long_run: Path) -> None:
    """The script draws axes and curves, samples run no code, and nothing is wider than the screen."""
    assert run("report", f"run_dir={long_run}").code == 0
    with browser.open_browser() as page:
        for width in (1280, 400):
            page.resize(width, 900)
            page.go((long_run / "report.html").as_uri())
            page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert page.run("return document.title") == "long"
            assert page.run("return document.documentElement.scrollWidth <= innerWidth")
            assert page.run("return document.querySelectorAll('line.grid').length") > 8
            drawn = page.run("return [...document.querySelectorAll('figure')].map(f => f.textContent)")
            assert all("step" in figure for figure in drawn), "every chart names its axes"
            strokes = (
                "return [...document.querySelectorAll('figure svg[role] path')].map(p => p.getAttribute('d').length)"
            )
            assert min(page.run(strokes)) > 10


NAMES = [
    "my\u00adloss",
    "a\u202eb/loss",
    "q\u200fz",
    "tab\tname",
    "zero\0width\u200b",
    "line\u2028end",
    "\U000e0041tag",
    "it's <b>",
]


@pytest.mark.parametrize("monitor", [f"val/{NAMES[0]}", f"val/{NAMES[1]}", f"val/{NAMES[-2]}"])
def test_every_chart_has_lines_whatever_its_metric_is_called(monitor: str, tmp_path: Path) -> None:
    """The script finds a chart's lines by the name that the page has for it; without them, it stops."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.yaml").write_text(
            yaml.safe_dump({"checkpoint": {"monitor": monitor, "mode": "min"}})
        )
        logged = {"step": 2, monitor: 1.0, **{f"train/{name}": 2.0 for name in NAMES}}
        (tmp_path / folder / "metrics.jsonl").write_text(json.dumps(logged) + "\n")
    for words in ([f"run_dir={tmp_path}/a"], [f"{tmp_path}/a", f"{tmp_path}/b"]):
        assert run("report", *words, "--out", f"{tmp_path}/page.html").code == 0
        page = Page((tmp_path / "page.html").read_text())
        charts = [
            attributes["data-chart"] for tag, attributes in page.tags if tag == "figure" and "data-chart" in attributes
        ]
        assert len(charts) >= len(NAMES)
        assert set(charts) == json.loads(page.script["curves"]).keys()


def test_thinning_keeps_every_stretchs_peaks() -> None:
    curve = Curve("x", list(range(10_000)), [math.sin(i / 50) + (i % 997 == 0) for i in range(10_000)])
    thin = thinned(curve, 500)
    assert len(thin.x) <= 502
    assert (min(thin.y), max(thin.y)) == (min(curve.y), max(curve.y))
    assert all(thin.y[i] == curve.y[x] for i, x in enumerate(thin.x))
    assert sum(y > 1.0 for y in thin.y) >= 5


@pytest.mark.parametrize("words", ["no run", "nowhere"])
def test_what_is_no_run_is_refused(tmp_path: Path, words: str) -> None:
    (tmp_path / "no run").mkdir()
    ended = run("report", str(tmp_path / words))
    assert ended.code == 2
    assert "holds no run" in message(ended.err)
