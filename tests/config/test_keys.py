"""Every key of the schema, when changed, has the effect that its class promises, and no key is without a class."""

import copy
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from chats import write_rows
from inprocess import train_tiny
from lmtrain.config import compose as rules
from lmtrain.config.constraints import MACHINE, MODEL, PREPARED, RATE, SHOWN, TRAJECTORY, VALIDATION, Shapes, at_least
from lmtrain.config.fingerprint import fingerprint, of_model
from lmtrain.config.keys import Key, keys_in, keys_of, value_of
from lmtrain.config.options import MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES
from lmtrain.config.proposers import option_holding
from lmtrain.config.schema import Config
from lmtrain.config.sections import all_keys
from lmtrain.data.corpus import build_corpus
from lmtrain.data.store.prepared import folder_key
from lmtrain.errors import UserError
from lmtrain.optim.schedules import LRSchedule
from lmtrain.run import resume
from support import EXPORT, REPO, SAMPLES, TINY, rows

ALL = all_keys()
CONTENTS = {
    "data": "1a",
    "tokenizer": "2b",
    "model": {"n_embd": 32},
    "model.name_or_path": "3c",
    "peft.adapter": "4d",
}
# Keys whose change shows in the content of another key on resume: a folder has no revision, a name of the hub has.
TOLD_BY = {"model.revision": "model.name_or_path"}


def a_config(*overrides: str) -> Config:
    return rules.check(rules.compose([*TINY, *overrides]))


# Settings under which keys have a value that are null by default, and options that are not in the schema's tables.
CONFIGS = {
    "text": ["data=text", "data.path=x"],
    "sft": ["objective=sft", "data=chat_jsonl", "data.path=x"],
    "dpo": ["objective=dpo", "data=preference_jsonl", "data.path=x", "data.max_length=null"],
    "lora": ["objective=sft", "data=chat_jsonl", "data.path=x", "peft=lora", "tokenizer=hub", "model=pretrained",
             "tokenizer.name_or_path=x", "model.name_or_path=y", "data.seq_len=8"],
    "memory": ["data=text", "data.path=x", "model=memory_nano"],
    "moe": ["data=text", "data.path=x", "model=moe_small"],
    "classes": ["data=text", "data.path=x", "run.allow_target=[test_keys]", "schedule=custom",
                "schedule._target_=test_keys.Flat", "optimizer=custom", "optimizer._target_=torch.optim.RAdam",
                "model=custom", "model._target_=transformers.LlamaForCausalLM"],
}  # fmt: skip
WITHOUT_OPTION = "no option of conf/ has this key: give it a default there, or set it in CONFIGS"


def every_option() -> dict[str, list[str]]:
    """Returns the settings of a config for each objective, optimizer and schedule in the schema's tables."""
    found = {}
    for name, (_, options) in OBJECTIVES.items():
        reader = option_holding(options.rows, [REPO / "conf"]) or "text"
        found[f"objective={name}"] = [f"objective={name}", f"data={reader}", "data.path=x"]
    for optimizer, schedule in itertools.zip_longest(OPTIMIZERS, SCHEDULES.keys() - {"range_test"}):
        chosen = [f"optimizer={optimizer or 'adamw'}", f"schedule={schedule or 'cosine'}"]
        found[" ".join(chosen)] = ["data=text", "data.path=x", *chosen]
    return found


class Flat(LRSchedule):
    def factor(self, step: int, total_steps: int) -> float:
        return 1.0


@pytest.fixture(scope="module")
def configs() -> dict[str, Config]:
    settings = {**CONFIGS, **every_option()}
    return {name: rules.check(rules.compose([*overrides, "data.seq_len=8"])) for name, overrides in settings.items()}


def with_value(config: Config, name: str, value: Any) -> Config:
    changed = copy.deepcopy(config)
    section: Any = changed
    for part in name.split(".")[:-1]:
        section = getattr(section, part)
    assert hasattr(section, name.split(".")[-1])
    setattr(section, name.split(".")[-1], value)
    return changed


def another(value: Any) -> Any:
    """Returns a different value of the same kind."""
    if value is None:
        return "something"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "more": "x"}
    return f"{value}x" if isinstance(value, str) else [*value, "more"]


NAMES: dict[int, set[str]] = {}  # of the keys by the id of the config


def set_in(configs: dict[str, Config], key: Key) -> Config:
    """Returns a config that has the key, with a value if one has."""
    for config in configs.values():
        if id(config) not in NAMES:  # ids stay valid, since the fixture keeps its configs
            NAMES[id(config)] = {k.name for k in keys_in(config)}
    having = [config for config in configs.values() if key.name in NAMES[id(config)]]
    assert having, f"{key.name}: {WITHOUT_OPTION}"
    return next((c for c in having if value_of(c, key.name) is not None), having[0])


WRITTEN: dict[int, str] = {}  # text of config.yaml by the id of the config


def told(
    tmp_path: Path, before: Config, after: Config, now: dict[str, Any] | None = None, allow: str | None = None
) -> list[str]:
    """Returns what is printed when `after` resumes a run of `before`, through the run's folder and its config.yaml."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    if id(before) not in WRITTEN:  # ids stay valid, since the fixture keeps its configs
        WRITTEN[id(before)] = rules.dump(before)
    (tmp_path / "run" / "config.yaml").write_text(WRITTEN[id(before)])
    theirs, ours = fingerprint(before, CONTENTS), fingerprint(after, now or CONTENTS)
    after = with_value(after, "run.allow_change", [allow] if allow else [])
    said: list[str] = []
    resume.check_fingerprint(checkpoint, theirs, ours, after, said.append)
    return said


def changed_one_by_one(configs: dict[str, Config], *kinds: Shapes) -> Iterator[tuple[Key, Config, Config]]:
    """Yields each key of these kinds with a config that has it, and the same config with another value."""
    for key in (k for k in ALL if k.shapes in kinds):
        config = set_in(configs, key)
        yield key, config, with_value(config, key.name, another(value_of(config, key.name)))


def wrong_keys(check: Callable[..., None], cases: Iterable[tuple[Key, Config, Config]]) -> dict[str, str]:
    """Returns what is wrong with each key that a check fails for: one test names them all."""
    wrong = {}
    for key, config, changed in cases:
        try:
            check(key, config, changed)
        except (AssertionError, UserError, pytest.fail.Exception) as error:
            wrong[key.name] = str(error)
    return wrong


def test_what_shapes_the_tokens_makes_another_folder(configs: dict[str, Config]) -> None:
    for key, config, changed in changed_one_by_one(configs, PREPARED):
        differ = folder_key(config.data, config.tokenizer) != folder_key(changed.data, changed.tokenizer)
        assert differ or key.by_content, key.name


def test_nothing_else_makes_another_folder(configs: dict[str, Config]) -> None:
    for key in (k for k in ALL if k.shapes is not PREPARED):
        config = set_in(configs, key)
        changed = with_value(config, key.name, another(value_of(config, key.name)))
        same = folder_key(config.data, config.tokenizer) == folder_key(changed.data, changed.tokenizer)
        assert same, key.name


def test_what_is_learned_is_refused_by_name_with_both_values(configs: dict[str, Config], tmp_path: Path) -> None:
    def check(key: Key, config: Config, changed: Config) -> None:
        then, now = value_of(config, key.name), value_of(changed, key.name)
        contents = dict(CONTENTS)
        if key.by_content:
            assert told(tmp_path, config, changed) == [], "another name for the same"
            contents[TOLD_BY.get(key.name, key.name)] = "another"
        with pytest.raises(UserError) as refusal:
            told(tmp_path, config, changed, contents)
        words = f"{key.name} then {then}, now {now}" if key.by_content else f"{key.name} (then {then}, now {now})"
        assert words in str(refusal.value)
        assert str(refusal.value).count("(then") == 1, "nothing else is refused"
        assert told(tmp_path, config, changed, contents, allow=key.name) == []

    assert wrong_keys(check, changed_one_by_one(configs, MODEL, TRAJECTORY)) == {}


def test_what_may_change_is_said_with_both_values(configs: dict[str, Config], tmp_path: Path) -> None:
    def check(key: Key, config: Config, changed: Config) -> None:
        then, now = value_of(config, key.name), value_of(changed, key.name)
        assert fingerprint(config, CONTENTS) == fingerprint(changed, CONTENTS)
        assert told(tmp_path, config, changed) == [f"changed since this run's last start: {key.name} {then} -> {now}"]

    assert wrong_keys(check, changed_one_by_one(configs, RATE, MACHINE)) == {}


def test_what_is_shown_or_in_the_tokens_themselves_is_no_matter(configs: dict[str, Config], tmp_path: Path) -> None:
    """Keys that shape the tokens are compared by the tokens, so moved data counts as the same data."""

    def check(key: Key, config: Config, changed: Config) -> None:
        assert fingerprint(config, CONTENTS) == fingerprint(changed, CONTENTS)
        if key.name != "run.allow_change":
            assert told(tmp_path, config, changed) == []

    assert wrong_keys(check, changed_one_by_one(configs, SHOWN, PREPARED)) == {}


def test_a_precomputed_reference_is_of_the_model_alone(configs: dict[str, Config]) -> None:
    for key in ALL:
        config = set_in(configs, key)
        changed = with_value(config, key.name, another(value_of(config, key.name)))
        assert (of_model(config) != of_model(changed)) == (key.shapes is MODEL and not key.by_content), key.name


def test_other_tokens_are_refused_with_the_keys_that_made_them(configs: dict[str, Config], tmp_path: Path) -> None:
    config = configs["sft"]
    changed = with_value(with_value(config, "data.system_prompt", "Be brief."), "data.num_samples", 9)
    now = {**CONTENTS, "data": "9f"}
    with pytest.raises(UserError, match=r"run\.allow_change=\[data\]") as refusal:
        told(tmp_path, config, changed, now)
    assert "data (then 1a, now 9f; " in str(refusal.value)
    assert "data.num_samples then None, now 9" in str(refusal.value)
    assert "data.system_prompt then None, now Be brief." in str(refusal.value)
    assert told(tmp_path, config, changed, now, allow="data") == []


def test_an_unknown_name_in_allow_change(configs: dict[str, Config], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective\.betta is not known; did you mean objective\.beta"):
        told(tmp_path, configs["dpo"], configs["dpo"], allow="objective.betta")


def test_a_key_without_a_class_is_noticed() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Inner:
        fine: Annotated[int, SHOWN, at_least(1)]
        forgotten: Annotated[int, at_least(1)]

    @dataclasses.dataclass(kw_only=True)
    class Outer:
        inner: Inner

    Outer.__annotations__["inner"] = Inner
    with pytest.raises(TypeError, match=r"inner\.forgotten: say in the schema what it shapes"):
        keys_of(Outer)

    @dataclasses.dataclass(kw_only=True)
    class Plain:
        plain: int

    with pytest.raises(TypeError, match=r"plain: say in the schema"):
        keys_of(Plain)


def test_a_key_of_several_classes_shapes_the_same_in_all() -> None:
    groups = {"objective": [options for _, options in OBJECTIVES.values()], "model": MODELS.values(),
              "optimizer": OPTIMIZERS.values(), "schedule": SCHEDULES.values()}  # fmt: skip
    for group, classes in groups.items():
        shapes: dict[str, set[Shapes]] = {}
        for key in (key for options in classes for key in keys_of(options, f"{group}.")):
            shapes.setdefault(key.name, set()).add(key.shapes)
        assert {name: found for name, found in shapes.items() if len(found) > 1} == {}


def test_the_walk_is_of_every_key(configs: dict[str, Config]) -> None:
    def leaves(node: Any, prefix: str = "") -> list[str]:
        found = []
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            name = f"{prefix}{field.name}"
            found += leaves(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
        return found

    for config in configs.values():
        assert sorted(k.name for k in keys_in(config)) == sorted(leaves(config))
    missing = {k.name for k in ALL} - {name for config in configs.values() for name in leaves(config)}
    assert not missing, f"{sorted(missing)}: {WITHOUT_OPTION}"
    assert {k.shapes for k in ALL} == set(Shapes)
    print({shapes.value: sum(k.shapes is shapes for k in ALL) for shapes in Shapes})


def text_folder(config: Config) -> str:
    return build_corpus(config).folder.name


@pytest.mark.slow
def test_files_are_told_apart_by_what_they_hold(corpus: Path, tmp_path: Path) -> None:
    """For keys whose content counts, another file gives another folder of tokens; the same file elsewhere does not."""
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    copied, other = tmp_path / "copied.txt", tmp_path / "other.txt"
    first = sorted(corpus.iterdir())[0]
    shutil.copy(first, copied)
    other.write_text(first.read_text() + "more")

    def text(*overrides: str) -> str:
        return text_folder(a_config("data=text", cache, *overrides)).rpartition("-")[2]

    base = text(f"data.path={first}")
    assert text(f"data.path={copied}") == base
    assert text(f"data.path={copied}", "data.format=text") == base, "auto is what it turned out to be"
    assert text(f"data.path={other}") != base
    validated = [text(f"data.path={first}", f"data.val_path={path}") for path in (first, copied, other)]
    assert validated[0] == validated[1] != validated[2]
    assert base not in validated

    chats = [write_rows(tmp_path / f"{n}.jsonl", "chat_jsonl", n) for n in (40, 41)]

    def rows_of(*overrides: str) -> str:
        settings = [
            "objective=sft",
            "data.max_length=512",
            "data.chat_template=vicuna",
            "data.val_fraction=0.2",
            "data.packing=off",
        ]
        return text_folder(a_config("data=mixture", "data.source=files", cache, *settings, *overrides)).rpartition("-")[
            2
        ]

    base = rows_of(f"data.path={chats[0]}")
    assert rows_of(f"data.path={chats[1]}") != base
    assert rows_of(f"data.path={chats[0]}", "data.chat_template=alpaca") != base
    mixtures = [rows_of("data.source=mixture", f"data.mixture=[{{path: {p}}}]") for p in chats]
    weighted = rows_of("data.source=mixture", f"data.mixture=[{{path: {chats[0]}, weight: 2}}]")
    assert len({base, *mixtures}) == 3
    assert weighted == mixtures[0], "how often rows are seen is computed from what is there"


SHOWN_ONLY = [
    "checkpoint.keep_last=5", "checkpoint.async_save=true", "trainer.log_every_n_steps=2", "data.num_workers=1",
    "trainer.limit_val_batches=2", "callbacks.samples.temperature=0", "callbacks.progress.style=none",
    "export.enabled=false", "trainer.val_check_interval=2", "data.max_untrained=null", "logger=csv",
]  # fmt: skip


def test_what_is_shown_changes_no_number(corpus: Path, tmp_path: Path) -> None:
    losses = []
    for name, overrides in (("base", []), ("shown", [o for o in SHOWN_ONLY if "untrained" not in o])):
        run_dir = tmp_path / name
        ended = train_tiny(corpus, EXPORT, SAMPLES, f"run.dir={run_dir}", *overrides)
        assert ended.code == 0, ended.err
        losses.append({r["step"]: r["train/loss"] for r in rows(run_dir / "metrics.jsonl") if "train/loss" in r})
    assert losses[1] == {step: loss for step, loss in losses[0].items() if step in losses[1]}
    assert losses[1]
    for override in SHOWN_ONLY[:-1]:
        name = override.split("=")[0]
        assert next(k for k in ALL if k.name == name).shapes in (SHOWN, VALIDATION)
