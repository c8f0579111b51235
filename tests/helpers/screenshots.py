"""Screenshots of every page that lmtrain makes, by a headless Chromium, and those of them that the docs show.

    python tests/helpers/screenshots.py SHOTS                   trains what it shows (ten minutes), then looks at it
    python tests/helpers/screenshots.py SHOTS --runs outputs    of runs that are there: first, second, memory and laptop
    python tests/helpers/screenshots.py SHOTS --docs            writes docs/images/ too

Each page is shown 1280 and 400 pixels wide; one that is wider than its window, or cuts a line of code, is an error.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from browser import Browser, open_browser

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTHS = (1280, 400)
SHORT = ["trainer.max_steps=120", "trainer.val_check_interval=30", "trainer.log_every_n_steps=2"]
RUNS = {
    "first": ["lmtrain.train", "run.name=first", *SHORT],
    "second": ["lmtrain.train", "run.name=second", "optimizer.lr=3e-4", *SHORT],
    "memory": ["lmtrain.train", "run.name=memory", "memory=bank", *SHORT],
    "laptop": ["lmtrain.pipeline", "pipeline=laptop", "pretrain.trainer.max_steps=150", "sft.trainer.max_steps=80",
               "pretrain.trainer.val_check_interval=50", "sft.trainer.val_check_interval=20"],
}  # fmt: skip
STORY = (
    "One day, Mia was in the park. She had a red ball. But Mia lost the red ball in the park. Then she went to the "
    "market. She was sad because the ball was gone. Where did Mia lose the red ball?"
)
# What looks wrong on a page: its lines of code that are cut, and what is wider than the window.
CUT = """return [...document.querySelectorAll('pre, pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1
  && getComputedStyle(e).display != 'inline').map(e => e.textContent.slice(0, 60))"""
WIDE = "return document.documentElement.scrollWidth > innerWidth"
SENT = "return document.querySelector('#send').textContent == 'Send' && document.querySelectorAll('.turn').length"


def lmtrain(words: list[str], folder: Path) -> None:
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def look(browser: Browser, address: str, name: str, shots: Path) -> list[str]:
    """Takes the page at both widths; returns what is wrong with it."""
    wrong = []
    for width in WIDTHS:
        browser.resize(width, 900)
        browser.go(address)
        browser.screenshot(shots / f"{name}_{width}.png")
        if browser.run(WIDE):
            wrong.append(f"{name} is wider than {width} px")
        wrong += [f"{name} at {width} px cuts {line!r}" for line in browser.run(CUT)]
    return wrong


def look_at_reports(browser: Browser, runs: Path, shots: Path) -> list[str]:
    """Pages of a run, of two compared, of a memory over time, of a pipeline."""
    for name in ("first", "memory"):
        lmtrain(["lmtrain.report", str(runs / name)], runs.parent)
    both = [str(runs / name) for name in ("first", "second")]
    lmtrain(["lmtrain.report", *both, "--out", str(shots / "compared.html")], runs.parent)
    pages = {"report": runs / "first/report.html", "compared": shots / "compared.html",
             "heat_map": runs / "memory/report.html",
             "pipeline": runs / "laptop/report.html"}  # fmt: skip
    return [line for name, page in pages.items() for line in look(browser, page.as_uri(), name, shots)]


def look_at_chat(browser: Browser, runs: Path, shots: Path) -> list[str]:
    """The chat page with two models and two questions."""
    models = [f"{runs.name}/laptop/pretrain", f"{runs.name}/laptop/sft"]
    words = ["lmtrain.chat", *models, "--web", "generate.max_new_tokens=80"]
    server = subprocess.Popen([sys.executable, "-m", *words], cwd=runs.parent, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address, wrong = server.stdout.readline().split()[0], []
        for width in WIDTHS:
            browser.resize(width, 700)
            browser.go(address)
            browser.wait("return document.querySelectorAll('section').length == 2")
            for question in (STORY, "Where is Mia?"):
                browser.run("question.value = arguments[0]; document.forms[0].requestSubmit()", question)
                browser.wait(SENT, 120)
            browser.screenshot(shots / f"chat_{width}.png", whole=False)
            wrong += [f"the chat page is wider than {width} px"] if browser.run(WIDE) else []
        return wrong
    finally:
        server.terminate()
        server.wait()


def look_at_site(browser: Browser, shots: Path) -> list[str]:
    """Every page of the documentation."""
    site = shots / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(build, cwd=DOCS.parent, env=environ, check=True)
    pages = sorted(site.rglob("index.html"))
    names = ["_".join(("docs", *page.relative_to(site).parts[:-1])) for page in pages]
    return [line for page, name in zip(pages, names, strict=True) for line in look(browser, page.as_uri(), name, shots)]


def write_images(browser: Browser, runs: Path, shots: Path) -> None:
    """The pictures that the docs show: the top of a run's page, of a pipeline's, and the chat page."""
    images = DOCS / "images"
    images.mkdir(exist_ok=True)
    for name, page, height in (("report", "first/report.html", 620), ("pipeline", "laptop/report.html", 620)):
        browser.resize(1100, height)
        browser.go((runs / page).as_uri())
        browser.screenshot(images / f"{name}.png", whole=False)
    (images / "chat.png").write_bytes((shots / "chat_1280.png").read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shots", type=Path)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--docs", action="store_true")
    args = parser.parse_args()
    args.shots.mkdir(parents=True, exist_ok=True)
    runs = args.runs or args.shots / "outputs"
    for name, words in {} if args.runs else RUNS.items():
        began = time.monotonic()
        lmtrain(words, args.shots)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    runs, shots = runs.resolve(), args.shots.resolve()
    with open_browser() as browser:
        wrong = look_at_reports(browser, runs, shots) + look_at_chat(browser, runs, shots)
        if args.docs:
            write_images(browser, runs, shots)
        wrong += look_at_site(browser, shots)
    print("\n".join([*wrong, f"{len(list(shots.glob('*.png')))} screenshots in {shots}"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
