"""`${...}` is resolved once, by few resolvers; a duplicate key is refused. Messages name file and key."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lmtrain.config import compose as rules
from lmtrain.config import interpolations
from lmtrain.config.override_text import as_typed
from lmtrain.config.targets import build_target
from lmtrain.errors import UserError
from lmtrain.generation.text_metrics import TextMetrics
from lmtrain.stages import definition

SMALL = ["data=text", "data.path=x", "data.seq_len=8"]


def composed(folder: Path, text: str) -> list[str]:
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{text}")
    return [*SMALL, "experiment=theirs"]


@given(st.text(alphabet="\\${}:.a'\" ", max_size=12))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@example("${oc.env:HOME}")
@example("\\\\${a}\\")
def test_any_text_survives_being_resolved(text: str) -> None:
    tree = {"a": text, "b": [text, {"c": text}]}
    assert interpolations.resolved(OmegaConf.create(interpolations.escaped(tree))) == tree


@pytest.mark.parametrize("text", ["echo ${HOME}", r"\${a}", "${oc.env:HOME}", r"\\\${oc.create:'{a: 1}'}", "a ${ b"])
def test_a_typed_text_stays_as_it_is_through_a_runs_folder(text: str, tmp_path: Path) -> None:
    config = rules.check(rules.compose([*SMALL, as_typed("generate.prompt", text)]))
    assert config.generate.prompt == text
    (tmp_path / "config.yaml").write_text(rules.dump(config))
    assert rules.load(tmp_path / "config.yaml", {}).generate.prompt == text
    assert rules.check(rules.compose([], str(tmp_path))).generate.prompt == text  # --config-dir=<run>


SHELL = "{_target_: %s, %s}"
PAYLOADS = {
    "run": ("torch.utils.collect_env.run", "_args_: [[/bin/sh, -c, touch MARKER]]"),
    "spawn": ("setuptools._distutils.spawn.spawn", "_args_: [[/bin/sh, -c, touch MARKER]]"),
    "write": ("lmtrain.files.write_atomic", "_args_: [MARKER, written]"),
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("slashes", [0, 3])
@pytest.mark.parametrize("key", ["callbacks.extra", "callbacks.samples.metrics", "evaluate.metrics"])
def test_an_escaped_interpolation_is_never_resolved_again(key: str, slashes: int, payload: str, tmp_path: Path) -> None:
    target, arguments = PAYLOADS[payload]
    marker = tmp_path / "ran"
    node = SHELL % (target, arguments.replace("MARKER", str(marker)))
    text = "\\" * slashes + f"${{oc.create:'{node}'}}"
    metric = key != "callbacks.extra"
    entry = {"_target_": "torchmetrics.text.EditDistance" if metric else "lightning.pytorch.callbacks.Timer",
             "reduction" if metric else "interval": text}  # fmt: skip
    section, name = key.rsplit(".", 1)
    tree: dict[str, Any] = {name: [entry]}
    for part in reversed(section.split(".")):
        tree = {part: tree}
    words = composed(tmp_path, yaml.safe_dump(tree))
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        _build(key, words, tmp_path)
    assert not marker.exists()


def _build(key: str, words: list[str], config_dir: Path) -> None:
    config = rules.check(rules.compose(words, str(config_dir)))
    if key == "callbacks.extra":
        build_target(config.callbacks.extra[0], key, pl.Callback)
    else:
        found = config.evaluate if key.startswith("evaluate") else config.callbacks.samples
        TextMetrics(found.metrics, (), key)


REFUSED = {
    "data: {text_column: \"${oc.create:'{a: 1}'}\"}": r"data\.text_column: \$\{oc\.create:\.\.\.\} can't be used",
    "data: {text_column: \"${oc.decode:'[1]'}\"}": r"data\.text_column: \$\{oc\.decode:",
    'data: {text_column: "${oc.env:X,${oc.decode:1}}"}': r"data\.text_column: \$\{oc\.decode:",
    'data: {text_column: "${oc.${seed}:1}"}': r"data\.text_column: \$\{oc\.\$\{seed\}:",
    'callbacks: {extra: [{_target_: a, b: ["${oc.deprecated:x}"]}]}': r"callbacks\.extra\[0\]\.b\[0\]: \$\{oc\.dep",
    'data: {text_column: "${nothing.here}"}': "data.text_column.*nothing.here",
    'run: {name: "${oc.env:NO_SUCH_NAME}"}': "NO_SUCH_NAME",
    'data: {text_column: "${data.text_column}"}': "recursive|refers to itself|Recursive",
}
MALFORMED = ["${", "${a", "${a:", "${${}", "${a b}", "x${.}y", "${a:'}"]


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_interpolation_is_one_message_with_its_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[text]) as refusal:
        rules.compose(composed(tmp_path, text), str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_interpolation_is_one_message(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        rules.compose(composed(tmp_path, yaml.safe_dump({"data": {"text_column": text}})), str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"text_column": text}}))
    with pytest.raises(UserError, match=r"config\.yaml"):
        rules.load(tmp_path / "config.yaml", {})


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    twice = "seed: 1\nrun: {name: a}\nseed: 2\n"
    with pytest.raises(UserError, match=r"duplicate key seed.*theirs\.yaml.*line 4"):
        rules.compose(composed(tmp_path, twice), str(tmp_path))
    (tmp_path / "config.yaml").write_text(twice)
    with pytest.raises(UserError, match=r"config\.yaml can't be read: the key seed is in line 1 and in line 3"):
        rules.load(tmp_path / "config.yaml", {})
    stage = "  one: {overrides: [data=text]}\n"
    (tmp_path / "mine.yaml").write_text(f"stages:\n{stage}  two: {{overrides: []}}\n{stage}")
    with pytest.raises(UserError, match=r"mine\.yaml can't be read: the key one is in line 2 and in line 4"):
        definition.read(tmp_path / "mine.yaml")
