"""A stranger's experiment with hostile values for every key of the schema: nothing runs, is sent or is written.

The keys come from the schema, so a new one is tried as well, and must be refused unless it holds numbers or is listed
here. What may be set is not taken from the declarations that are tested.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from guard import WORD, Watch, watching
from omegaconf import OmegaConf

from lmtrain.config import compose as rules
from lmtrain.config import interpolations, trust
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.keys import Key, keys_of
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError
from lmtrain.objectives.distill import DistillOptions
from lmtrain.objectives.grpo_options import GRPOOptions
from lmtrain.objectives.kto import KTOOptions
from lmtrain.objectives.mdlm import MDLMOptions
from lmtrain.objectives.reward import RewardOptions

OWN: dict[str, Any] = {
    "grpo": GRPOOptions, "kto": KTOOptions, "mdlm": MDLMOptions, "distill": DistillOptions, "reward": RewardOptions,
}  # fmt: skip
ADDRESS, OUTSIDE, CLASS = "http://127.0.0.1:9/PWNED", "/nowhere/PWNED/../x", "pwned_module.Thing"
TEXTS = {"an address": ADDRESS, "a place outside": OUTSIDE, "a class": CLASS}


def named(names: str) -> set[str]:
    return set(names.split())


# Text and lists that are only shown, compared, or looked up in a table, so that any value of them is harmless.
HARMLESS = named(
    """
    budget.updates callbacks.early_stopping.monitor callbacks.samples.prompts checkpoint.monitor data.column_separator
    data.columns data.ignore_columns data.template_options generate.template_options
    data.config_name data.conversation_format data.document_start data.fim.middle_token data.fim.prefix_token
    data.fim.suffix_token data.prompt_template data.response_template data.revision data.system_prompt
    data.text_column data.train_split data.val_split estimate.device evaluate.checkpoint evaluate.name
    export.checkpoint generate.checkpoint generate.prompt generate.system_prompt memory.layers
    model.attention model.family model.hidden_act model.name model.revision
    objective.mask_token objective.name objective.stop_tokens optimizer.adamw_pattern optimizer.betas
    optimizer.full_state_pattern optimizer.name peft.init_weights peft.modules_to_save peft.target_modules run.name
    run.time_limit schedule.name sweep.name sweep.space tokenizer.add_tokens tokenizer.revision trainer.devices
    """
)
# What is read: local paths are allowed, addresses are not. The metrics are names in a table.
READ = named(
    """
    callbacks.samples.metrics chat.against data.chat_template data.mixture data.name data.path data.val_path
    data.val_sets evaluate.against evaluate.metrics evaluate.reference generate.prompts_file model.name_or_path
    objective.teacher peft.adapter run.cooldown_from run.resume run_dir tokenizer.name_or_path
    """
)
FOLDERS = {"run.dir", "run.root", "sweep.root"}  # made below the working folder
# Numbers and booleans that no stranger may set to every value.
SWITCHES = {"chat.port", "chat.web", "export.push_private", "model.trust_remote_code", "tokenizer.trust_remote_code"}


def every_key() -> Iterator[tuple[str, Key]]:
    """Yields each key with an objective that has it."""
    common = {key.name: key for key in all_keys()}
    yield from (("causal_lm", key) for key in common.values())
    for name, options in OWN.items():
        yield from ((name, key) for key in keys_of(options, "objective.") if key.name not in common)


KEYS = list(every_key())


def is_free(key: Key) -> bool:
    """Returns whether the values of a key are not limited to numbers, booleans and known words."""
    has_words = any(hasattr(constraint, "options") for constraint in key.constraints)
    return not has_words and any(word in str(key.type) for word in ("str", "Any", "dict", "list"))


def hostile(key: Key, text: str) -> Any:
    """Returns a value of the key's type that is as bad as it can be."""
    type_ = str(key.type)
    call = {"path": text} if key.name in READ else {"_target_": CLASS, "dirpath": text, "base_url": text, "x": [text]}
    if "dict" in type_:
        return [call] if type_.startswith("list") else {"any": {"settings": call}, **call}
    if "list" in type_:
        return [text]
    return text if is_free(key) else key.name != "export.push_private" if "bool" in type_ else 7


def must_be_refused(key: Key, kind: str) -> bool:
    if not is_free(key):
        return key.name in SWITCHES
    allowed = {
        "an address": HARMLESS | FOLDERS,
        "a place outside": HARMLESS | READ,
        "a class": HARMLESS | READ | FOLDERS,
    }
    return key.name not in allowed[kind]


@pytest.mark.parametrize("objective", ["causal_lm", *OWN])
@pytest.mark.parametrize("kind", TEXTS)
def test_hostile_values_of_every_key(kind: str, objective: str, tmp_path: Path) -> None:
    tree = rules.compose([f"objective={objective}"])
    keys = [key for of, key in KEYS if of == objective or (of == "causal_lm" and key.name in ("run.dir", "logger"))]
    for key in keys:
        OmegaConf.update(tree, key.name, hostile(key, TEXTS[kind]), merge=False, force_add=True)
    plain = interpolations.resolved(tree)
    with watching(Watch([], [tmp_path])) as watch:
        judge = trust._Judge(tree, plain, [], tmp_path, list)
        refused = {*judge.wrong(trust._values(plain, {key.name: key for key in keys}))}
        with pytest.raises(UserError, match="counts only where you type it"):
            trust.refuse(tree, plain, [], tmp_path, list)
    found = {key.name for key in keys if any(name == key.name or name.startswith(f"{key.name}.") for name in refused)}
    assert found == {key.name for key in keys if must_be_refused(key, kind)}
    assert watch.seen == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.nightly
def test_an_experiment_for_every_key(tmp_path: Path) -> None:
    """Composes and checks 572 experiments, each with one hostile value."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "pwned_module.py").write_text(f"open({str(tmp_path / WORD)!r}, 'w')\nclass Thing: pass\n")
    file, wrong = tmp_path / "experiment" / "theirs.yaml", []
    watch = Watch([], [tmp_path])
    for objective, key in KEYS:
        for kind in TEXTS if is_free(key) else ["an address"]:
            tree = hostile(key, TEXTS[kind])
            for part in reversed(key.name.split(".")):
                tree = {part: tree}
            file.write_text(f"# @package _global_\n{yaml.safe_dump(tree)}")
            refusal = ""
            try:
                with watching(watch):
                    rules.check(rules.compose([f"objective={objective}", "experiment=theirs"], str(tmp_path)))
            except UserError as error:
                refusal = str(error)
            if must_be_refused(key, kind) != (f"{file} sets " in refusal):
                wrong.append(f"{key.name}, {kind}: {refusal}")
    assert wrong == []
    assert watch.seen == []
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"theirs.yaml", "pwned_module.py"}


# What runs the code of rows or of answers, or parses them with a library that may: it has to be typed.
EXECUTES = {"reward=code", "reward=math_verify"}
OPTIONS = {
    d.name: [f"{d.name}={o}" for o in options_of(d.name, [conf_dir()])] for d in conf_dir().iterdir() if d.is_dir()
}
QUICK = ("reward", "logger", "callbacks", "objective", "trainer")


@pytest.mark.parametrize("group", [pytest.param(g, marks=() if g in QUICK else pytest.mark.slow) for g in OPTIONS])
def test_a_stranger_may_choose_all_options_but_those_that_execute(group: str, tmp_path: Path) -> None:
    refused = set()
    for option in OPTIONS[group] if group not in ("pipeline", "sweep") else ():  # which are no options of one run
        tree = rules.compose([option])
        try:
            trust.refuse(tree, interpolations.resolved(tree), [], tmp_path, list)
        except UserError:
            refused.add(option)
    assert refused == EXECUTES & {*OPTIONS[group]}
