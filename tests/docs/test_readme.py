"""README and docs are correct: commands run, links resolve, options and keys exist, and no option is missing."""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet

from chats import write_rows
from inprocess import TWO_STEPS, run
from lmtrain import cli, new
from lmtrain.config import compose as config
from lmtrain.config.keys import flat
from loopback_hub import serving
from support import REPO
from tiny_pretrained import save_pretrained

CONF = REPO / "conf"
PAGES = sorted(p for f in (REPO, REPO / "docs", REPO / "benchmarks", REPO / "examples/stories") for p in f.glob("*.md"))
GROUPS = {g.name: {o.stem for o in g.glob("*.yaml")} - {"base", "common"} for g in CONF.iterdir() if g.is_dir()}


def without_blocks(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    """Returns the commands of a page's bash blocks, without comments and with `a && b` split in two."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", page.read_text(), flags=re.DOTALL)
    whole = [re.sub(r"\s*\\\n\s*", " ", block) for block in blocks]
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in whole for line in block.splitlines()]
    return [part.strip() for line in lines if line for part in line.split("&&")]


REFERENCE = REPO / "docs" / "reference.md"  # the tables of options and files
README = [*commands(REPO / "README.md"), *commands(REFERENCE)]
SHRINK = [
    *("model.num_hidden_layers=1", "model.num_attention_heads=2", "model.hidden_size=32"),
    *("model.max_position_embeddings=32", "data.seq_len=32", "data.global_batch_size=4", "data.micro_batch_size=2"),
    *("trainer.precision=32-true", "callbacks.samples.max_new_tokens=4", "data.num_samples=40"),
    *(*TWO_STEPS, "trainer.max_steps=1", "schedule.warmup_steps=0"),
]


def overrides(words: list[str]) -> list[str]:
    """Returns the overrides among the words of a command, without flags and bare words."""
    return [w for w in words if not w.startswith("-") and "=" in w]


def test_there_are_commands() -> None:
    print(f"{len(README)} commands in README.md and reference.md, {sum(len(commands(p)) for p in PAGES)} in all pages")
    assert len(README) >= 7


def runs() -> Iterator[ParameterSet]:
    """Yields each command that runs a verb; commands that start processes or ask the hub are marked slow."""
    for command in dict.fromkeys(README):
        if command.startswith("python -m lmtrain."):
            words = shlex.split(command)[3:]
            light = "-m" not in words and "data=wikitext" not in words and "experiment=shakespeare_char" not in words
            yield pytest.param(command, marks=[] if light else pytest.mark.slow)


def needs_the_hub(words: list[str]) -> bool:
    tree = config.compose([w for w in overrides(words) if "," not in w])
    return tree.data.source == "hub" or tree.tokenizer.kind == "hub"


@pytest.mark.parametrize("command", runs())
def test_commands_of_the_readme_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of README and reference.md run with small settings; those that need the hub use the loopback hub."""
    monkeypatch.chdir(tmp_path)
    _, _, module, *words = shlex.split(command)
    verb = module.removeprefix("lmtrain.")
    (tmp_path / "my_book.txt").write_text("It was a dark and stormy night. " * 400)
    if any(w in ("--help", "--cfg", "--why") for w in words):
        assert run(verb, *words).code == 0
        return
    shrink = [*SHRINK]
    if config.compose([w for w in overrides(words) if "," not in w]).tokenizer.kind == "bpe":
        shrink.append("tokenizer.vocab_size=300")
    if needs_the_hub(words):
        with serving(tmp_path / "hf") as env:
            code = subprocess.run([sys.executable, "-m", module, *words, *shrink], env=env, check=False).returncode
    else:
        code = run(verb, *words, *shrink).code
    assert code == 0
    made = list(tmp_path.glob("outputs/*/export")) + list(tmp_path.glob("outputs/sweeps/*/*/export"))
    assert len(made) == (2 if "-m" in words else 1)


@pytest.mark.slow
def test_the_doors_of_the_readme_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's other commands run in their order, on a tiny model and a few rows: each ends well."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "chats.jsonl", "chat_jsonl")
    write_rows(tmp_path / "pairs.jsonl", "preference_jsonl")
    lines = (json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40))
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    base = save_pretrained(tmp_path / "outputs" / "my_sft", max_position_embeddings=512)
    tiny = [f"model.name_or_path={base}", "data.seq_len=512", "data.global_batch_size=4", "data.micro_batch_size=2",
            "data.val_fraction=0.1", "trainer.precision=32-true", "data.chat_template=vicuna"]  # fmt: skip
    short = [*TWO_STEPS, "callbacks.samples.max_new_tokens=4", "schedule.warmup_steps=0", "logger=none"]
    doors = re.findall(r"^python -m lmtrain\.(\w+) ([^#\n]*)", (REPO / "README.md").read_text(), flags=re.MULTILINE)
    doors = [
        (verb, shlex.split(words)) for verb, words in doors if f"python -m lmtrain.{verb} {words}".strip() not in README
    ]
    assert [verb for verb, _ in doors] == ["train", "train", "train", "inspect", "chat", "evaluate"]
    for number, (verb, words) in enumerate(doors):
        monkeypatch.setattr("sys.stdin", io.StringIO("How far is Oslo?\n"))
        more = {"train": [*tiny, *short, f"run.dir=outputs/{number or 'my_run'}"], "inspect": tiny}.get(verb, [])
        if "objective=grpo" in words:
            more = [w for w in more if not w.startswith("model.")] + [
                "objective.group_size=2",
                "objective.max_new_tokens=4",
            ]
        ended = run(verb, *words, *more)
        assert ended.code == 0, ended.err


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_is_one(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make targets, verbs and scripts of every command exist, and its overrides compose and are accepted."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), flags=re.DOTALL):
        (tmp_path / name).write_text(text)  # a command may name a class in it
    monkeypatch.chdir(tmp_path)
    for kind, name in re.findall(r"`python -m lmtrain.new (\w+) (\w+)`", page.read_text()):
        new.write(kind, name)
    for command in commands(page):
        words = shlex.split(command)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=REPO, check=True, capture_output=True)
        elif words[:2] == ["python", "-m"] and words[2].startswith("lmtrain."):
            verb = words[2].removeprefix("lmtrain.")
            assert verb in cli.VERBS | cli.OTHERS
            if verb in cli.VERBS and "-m" not in words[3:]:
                config.check(config.compose(overrides(words[3:])))
        elif words[0] == "python":
            assert words[1] == "-m" or (REPO / words[1]).exists(), command
        else:
            assert words[0] in ("pip", ".", ".venv/bin/pre-commit", "cd", "git"), f"{page.name}: {command}"
        for name in ("constraints.txt", "pyproject.toml"):
            assert name not in words or (REPO / name).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", without_blocks(page))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_the_steps_of_contributing_name_what_is_there() -> None:
    named = re.findall(r"`((?:conf|src|tests|docs)/[\w./]*)`", (REPO / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (REPO / name).exists()] == []


def table(page: Path) -> dict[str, str]:
    """Returns {group: cell} of the table rows whose cell begins with `group=`."""
    rows = re.findall(r"^\|[^|]*\| `(\w+)=` ([^|]*)\|$", page.read_text(), flags=re.MULTILINE)
    return dict(rows)


def options_named(cell: str) -> set[str]:
    """Returns the option names listed in a cell: single words, or the word in backticks that a phrase begins with."""
    listed = re.sub(r"\([^)]*\)", "", cell.split(";")[0])
    items = [item.strip() for item in re.split(r",|:| or ", listed)]
    return {item.split()[0].strip("`") for item in items if item and (" " not in item or item.startswith("`"))}


def test_the_tables_name_every_option_and_no_other() -> None:
    rows = table(REFERENCE)
    with_choice = {group for group, options in GROUPS.items() if len(options) > 1}
    assert with_choice - set(rows) == set(), "groups without a row"
    for group, cell in rows.items():
        assert options_named(cell) == GROUPS[group], f"conf/{group}"


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_blocks(page))


def known_keys() -> set[str]:
    """Returns every dotted key that a yaml of conf/ sets."""
    keys: set[str] = set()
    for file in CONF.glob("*/*.yaml"):
        text = file.read_text()
        tree = yaml.safe_load(text)
        keys |= set(dict(flat(tree if "@package _global_" in text else {file.parent.name: tree})))
    return keys


NO_KEYS = {"trainer.callback_metrics", "trainer.accumulate_grad_batches", "peft.optimizers"}  # look like keys
KEYS = known_keys() | NO_KEYS


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_and_options_in_the_text_exist(page: Path) -> None:
    def each(pattern: str, is_right: Callable[[str, str], bool]) -> list[str]:
        found = [m for span in code_spans(page) for m in re.finditer(pattern, span)]
        return [m[0] for m in found if not is_right(m[1], m[2])]

    unknown = each(r"(?<![\w./+])(\w+)\.(?!(?:py|json)\b)([a-z_]+(?:\.[a-z_]+)*)(?==|$|\s)",
                   lambda group, key: group not in GROUPS or f"{group}.{key}" in KEYS)  # fmt: skip
    assert not unknown, f"{page.name} names keys that are not there"
    wrong = each(r"(?<![\w.+/])([a-z]+)=([a-z][a-z0-9_|]*)(?=$|\s)",
                 lambda group, options: group not in GROUPS or set(options.split("|")) <= GROUPS[group])  # fmt: skip
    assert not wrong, f"{page.name} names options that are not there"


def test_the_python_script(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (REPO / "docs" / "lightning.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    assert len(script.splitlines()) <= 12
    smaller = [*SHRINK, "tokenizer=bytes", "data=text", f"data.path={corpus}"]
    exec(script.replace('"])', f'"] + {smaller})', 1))  # noqa: S102
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0  # val/loss
