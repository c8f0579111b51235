"""Every key=value that docs, README and messages recommend is accepted on the command line."""

import ast
import re
import shlex
from collections.abc import Iterator

import pytest
from omegaconf import DictConfig, OmegaConf

from lmtrain.config import compose as config
from lmtrain.errors import UserError
from support import REPO

PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
KEY = r"[+]?[a-z_]+(?:[./][a-z_0-9]+)*"
DOTTED = r"[+]?[a-z_]+(?:[.][a-z_0-9]+)+"
VALUE = r"(?:\[[^\]\0]*\]|\{[^}\0]*\}|[^\s,;:)(\"'`\0\[\]{}]+)"
# Settings that bring further keys into the config; a recommended key may need any of them.
CONTEXTS: list[list[str]] = [
    [],
    ["objective=sft", "data=chat_jsonl", "tokenizer=hub"],
    ["objective=dpo", "data=preference_jsonl"],
    ["model=pretrained", "peft=lora"],
    ["data=mixture"],
    ["optimizer=muon"],
    ["optimizer=custom"],
    ["objective=mdlm"],
    ["objective=grpo", "data=prompts_jsonl", "reward=model"],
    ["objective=grpo", "data=prompts_jsonl", "reward=code"],
    ["objective=grpo", "data=prompts_jsonl", "reward=sum"],
    ["objective=distill", "data=chat_jsonl"],
    ["objective=reward", "data=preference_jsonl"],
    ["logger=wandb"],
    ["model=memory_nano"],
    ["sweep=optuna"],
    ["schedule=wsd"],
]
# No overrides of lmtrain: settings of other programs, and values that a message calls wrong.
OTHERS = {
    "assistant_only_loss=True", "hydra/launcher=ray", "core.fsmonitor=false", "trust_remote_code=True",
    "top_k=1", "sft.optimizer.lr=1e-4", "sft.optimizer.lr=a", "answers.evaluate.limit=100",
    "use_distributed_sampler=False", "objective.updates_per_rollout=U", "num_iterations=1",
    "num_labels=1",
}  # fmt: skip


def in_pages() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for quoted in re.findall(r"`([^`\n]+)`", text):
            if re.match(rf"'?{KEY}=", quoted):
                yield page.name, quoted


def in_messages() -> Iterator[tuple[str, str]]:
    """Yields the settings in strings of the source, except those with an interpolated value, which cannot be tried."""
    files = [f for f in sorted((REPO / "src").rglob("*.py")) if f.name != "new.py"]  # it holds source templates
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            for found in re.findall(rf"(?<![\w.\0{{\[=/-])({DOTTED}={VALUE})(?![\w\0.{{])", "".join(parts)):
                yield file.name, found.rstrip(".")


def words_of(text: str) -> list[str]:
    """Returns the words of a command as a shell splits them, or one word for each value of a choice a|b."""
    words = shlex.split(text)
    choices = [w for w in words if re.fullmatch(r"[a-z]+=[a-z_0-9]+(\|[a-z_0-9]+)+", w)]
    if not choices:
        return words
    group, _, options = choices[0].partition("=")
    return [f"{group}={option}" for option in options.split("|")]


def not_ours(text: str) -> bool:
    return text in OTHERS or text.startswith("pipeline=")  # for the verb pipeline


def is_an_example(text: str) -> bool:
    """Returns whether a setting has a concrete value and not a placeholder."""
    place = re.search(r"=[A-Z]{2}|=\?\?\?|NAME|<[a-z ]+>|\.\.\.|\$\{stage", text)
    return place is None and not text.endswith("=")


def composed(words: list[str]) -> DictConfig:
    return config.compose(words, for_sweep=any(w.startswith(("sweep", "hydra")) for w in words))


def refused(words: list[str]) -> str | None:
    """Returns the first refusal of these words if every context refuses them, else None."""
    problems = []
    for context in CONTEXTS:
        try:
            composed([*context, *words])
        except UserError as error:
            problems.append(str(error))
        else:
            return None
    return problems[0]


def taken_together(settings: list[str]) -> set[str]:
    """Returns the settings that some context accepts; composing many at once is faster than one by one."""
    taken: set[str] = set()
    for context in CONTEXTS:
        tree = composed(context)
        left = [s for s in settings if s not in taken and re.match(DOTTED, s) and not s.startswith(("sweep", "+"))]
        here = [s for s in left if OmegaConf.select(tree, s.partition("=")[0], default="?") != "?"]
        while here:
            batch = {s.partition("=")[0]: s for s in here}
            try:
                composed([*context, *batch.values()])
                taken |= set(batch.values())
            except UserError:
                break  # the rest is tried one by one
            here = [s for s in here if s not in taken]
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("source", [in_pages, in_messages])
def test_every_recommended_setting_can_be_typed(source: object) -> None:
    found = {text: where for where, text in source() if is_an_example(text) and not not_ours(text)}  # type: ignore[operator]
    print(f"{len(found)} settings")
    assert len(found) > 20
    commands = {text: [text] if source is in_messages else words_of(text) for text in found}
    taken = taken_together([words[0] for words in commands.values() if len(words) == 1])
    wrong = {}
    for text, words in commands.items():
        tries = [[w] for w in words] if "|" in text else [words]
        problems = [p for w in tries if w[0] not in taken or len(w) > 1 for p in [refused(w)] if p]
        if problems:
            wrong[f"{found[text]}: {text}"] = problems[0]
    assert not wrong, "\n".join(f"{k}\n    {v}" for k, v in wrong.items())


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("data.columns={prompt: question}", "data.columns", {"prompt": "question"}),
        ("data.columns.prompt=question", "data.columns", {"prompt": "question"}),
        ("data.prompt_template={title}: {body}", "data.prompt_template", "{title}: {body}"),
        ("data.response_template={summary}", "data.response_template", "{summary}"),
        ('data.system_prompt=Say "no", = and \\', "data.system_prompt", 'Say "no", = and \\'),
        ("tokenizer.add_tokens=[<|im_start|>, <|im_end|>]", "tokenizer.add_tokens", ["<|im_start|>", "<|im_end|>"]),
    ],
)
def test_what_hydras_grammar_alone_refuses(typed: str, key: str, value: object) -> None:
    checked = config.check(config.compose([*CONTEXTS[1], "data.seq_len=8", "tokenizer.name_or_path=x", typed]))
    section, name = key.split(".")
    assert getattr(getattr(checked, section), name) == value


def test_a_page_is_read() -> None:
    """The collectors find the kinds of settings they are meant to find."""
    assert ("sft.md", "'data.columns={prompt: question}'") in list(in_pages())
    assert any(text == "callbacks.early_stopping.enabled=true" for _, text in in_messages())
