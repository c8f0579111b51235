"""`lmtrain.report`: the page of a run, written at its end and on demand, with the contents of the run's files."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import browser
from inprocess import message, run, train_tiny
from lmtrain.config import compose as rules
from lmtrain.config.batch import logged_every
from lmtrain.reports.curves import Curve, thinned
from lmtrain.reports.report import reported_run, write_own
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
        self.rows: list[list[str]] = []  # of all tables, one after the other
        self._in_cell = False
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = (dict(attrs).get("id") or tag) if tag in ("script", "style") else self._in
        self.rows += [[]] if tag == "tr" else []
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = "" if tag in ("script", "style") else self._in
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in:
            self.script[self._in] = self.script.get(self._in, "") + data
        else:
            self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data


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
    loss = summary["best_metric"]["val/loss"]
    chosen = f"{loss:.4g}val/loss of the best checkpoint, step 2 ({best:.4g} bits per byte)"
    for number in (chosen, str(summary["tokens"]), "2 steps"):
        assert number in first, number
    sample = rows(tmp_path / "a" / "samples.jsonl")[-1]
    newest = page.text[page.text.index("Newest sample, step 2") :]
    assert f"{visible(sample['prompt'])}{visible(sample['text'])}" in newest
    set_ = page.text[page.text.index("What was set") : page.text.index("keys that differ from the defaults")]
    assert "optimizer.lr0.01" in set_
    assert "trainer.accelerator" not in set_, "which nobody has typed"
    for words in ("optimizer.lr", "0.01", "step_00000002 (best) (last)", "AutoModelForCausalLM", ": began"):
        assert words in page.text, words
    about = page.text[page.text.index("About this run") : page.text.index("Checkpoints")]
    assert f"parameters{summary['speed_of']['parameters']:,}" in about
    assert summary["command"] in about
    assert summary["git"] is None or summary["git"]["commit"] in about
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
    labels = {
        "a": "hidden_size=32, lr=0.01, max_steps=4",
        "b": "hidden_size=16, lr=1e-05, max_steps=2",
    }  # what was typed and differs
    assert {row[0]: row[1] for row in page.rows if len(row) == 6 and row[0] != "run"} == labels
    drawn = {line["name"]: line["pale"] for line in json.loads(page.script["curves"])["loss"]}
    assert drawn == {f"{name}: {split}/loss": split == "train" for name in "ab" for split in ("train", "val")}
    clock = json.loads(page.script["clocks"])["a"]
    logged = [row for row in rows(tmp_path / "a" / "metrics.jsonl") if "tokens_seen" in row]
    assert [(step, tokens) for step, tokens, _ in clock] == [(row["step"], row["tokens_seen"]) for row in logged]
    starts = [row["time"] for row in rows(tmp_path / "a" / "starts.jsonl")]
    idle = starts[1] - max(row["time"] for row in logged if row["time"] < starts[1])
    assert clock[-1][2] == pytest.approx((logged[-1]["time"] - starts[0] - idle) / 60, abs=2e-3)
    prompt = rows(tmp_path / "a" / "samples.jsonl")[-1]["prompt"]
    assert page.text.count(visible(prompt).strip()) == 1, "the prompt once, and its continuations side by side"
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
    found: list[list[str]] = []
    for row in (row for row in Page(texts[0]).rows if len(row) == 6 and row[0] != "key"):
        found += [[]] if row[0] == "run" else []
        found[-1] += [row[0]] if row[0] != "run" else []
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
    assert reported_run(RunDir(tmp_path / "run")).how_to_use == [f"python -m lmtrain.generate {tmp_path}/run"]


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


def test_a_short_run_draws_every_step_and_a_page_has_no_empty_card(corpus: Path, tmp_path: Path) -> None:
    """Nobody types trainer.log_every_n_steps for twelve steps; and a run that has no metrics yet has no chart."""
    words = ["trainer.max_steps=12", "trainer.log_every_n_steps=null", "report.enabled=true", f"run.dir={tmp_path}/a"]
    assert train_tiny(corpus, *words).code == 0
    page = Page((tmp_path / "a" / "report.html").read_text())
    train, val = json.loads(page.script["curves"])["loss"]
    assert (train["name"], train["x"]) == ("train/loss", list(range(1, 13)))
    assert val["name"] == "val/loss"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text("objective: {name: sft}\n")
    (tmp_path / "b" / "summary.json").write_text(json.dumps({"status": "failed", "step": 0}))
    assert run("report", str(tmp_path / "b")).code == 0
    tags = Page((tmp_path / "b" / "report.html").read_text()).tags
    classes = {(attributes.get("class") or "").strip() for _, attributes in tags}
    assert not classes & {"numbers", "lead", "lead two", "sample", "controls"}
    assert logged_every(rules.check(rules.compose([])).trainer, 101) == 10


def test_an_answer_that_was_cut_off_is_marked(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("objective: {name: sft}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    row = {"step": 1, "text": "Mia has", "reference": "Mia has a hat.", "is_answer": True}
    asked = [{**row, "prompt": "Who?", "cut_off": True}, {**row, "prompt": "What?", "text": "Mia has a hat."}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    shown = reported_run(RunDir(tmp_path)).samples
    assert ["cut off" in " ".join(shown[prompt][0].notes) for prompt in ("Who?", "What?")] == [True, False]


def test_runs_of_recipes_are_told_apart_by_the_recipes_values(tmp_path: Path) -> None:
    """What was typed is the same word or none; two runs with all the same are said to be so."""
    for name, lr, width in (("a", 0.1, 8), ("b", 0.2, 8), ("c", 0.2, 16), ("d", 0.2, 16)):
        (tmp_path / name).mkdir()
        tree = {"objective": {"name": "sft"}, "optimizer": {"lr": lr}, "model": {"name": f"m{width}", "width": width}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(tree))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    folders = [str(tmp_path / name) for name in "abcd"]
    assert run("report", *folders, "--out", f"{tmp_path}/page.html").code == 0
    labels = {row[0]: row[1] for row in Page((tmp_path / "page.html").read_text()).rows if row[0] in "abcd"}
    assert labels == {
        "a": "model=m8, lr=0.1",
        "b": "model=m8, lr=0.2",
        "c": "model=m16, lr=0.2",
        "d": "model=m16, lr=0.2",
    }
    assert run("report", *folders[2:], "--out", f"{tmp_path}/page.html").code == 0
    labels = {row[0]: row[1] for row in Page((tmp_path / "page.html").read_text()).rows if row[0] in ("c", "d")}
    assert set(labels.values()) == {"the same settings"}


@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_axes_end_with_the_data_and_no_dot_is_cut(tmp_path: Path) -> None:
    """In both colour schemes, at both widths, and without a complaint in the browser's console."""
    (tmp_path / "config.yaml").write_text("objective: {name: sft}\n")
    logged = [{"step": n, "train/loss": 6.09 - 0.07 * n} for n in range(1, 78)]
    logged += [{"step": n, "val/loss": 5.0 - 0.06 * n} for n in (20, 77)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    assert run("report", str(tmp_path)).code == 0
    labels = "[...document.querySelectorAll('figure text:not(.axis)')]"
    ticks = f"return {labels}.map(t => [t.getAttribute('class'), +t.textContent])"
    with browser.open_browser() as page:
        for width in (1280, 400):
            page.resize(width, 900)
            page.prefer("dark" if width == 400 else "light")
            page.go((tmp_path / "report.html").as_uri())
            found = page.run(ticks)
            steps, losses = ([value for kind, value in found if (kind == "x") is x] for x in (True, False))
            assert (steps[0], steps[-1]) == (1, 77)
            assert losses[0] <= 5.0 - 0.06 * 77
            assert 6.02 <= losses[-1] < 8
            whole = """return [...document.querySelectorAll('figure circle')].map(dot => {
                const seen = dot.ownerSVGElement.viewBox.baseVal, at = name => dot[name].baseVal.value;
                return at('cx') - at('r') >= seen.x && at('cx') + at('r') <= seen.x + seen.width
                    && at('cy') - at('r') >= seen.y && at('cy') + at('r') <= seen.y + seen.height; })"""
            assert page.run(whole) == [True, True]
        assert page.said == []


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
