"""Every yaml under conf/ is composed, checked and run for two steps; each key is documented and in the schema.

A new yaml of a known group is covered automatically; a new group fails until it gets its overrides below.
"""

import itertools
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hydra.utils import get_class
from omegaconf import OmegaConf
from transformers import AutoModelForSequenceClassification

from chats import ROWS, write_rows
from inprocess import TWO_STEPS, Ended, run, train_tiny
from lmtrain.callbacks.metrics import without_times
from lmtrain.config import compose as config
from lmtrain.config import interpolations, sections
from lmtrain.config.keys import keys_of as keys_of_class
from lmtrain.config.schema import Config, EmaConfig
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError
from lmtrain.models.build import build_model
from support import EXPORT, REPO, SAMPLES, TINY, rows, thinned
from tiny_pretrained import save_pretrained

CONF = REPO / "conf"
# Pipelines are not part of a run's config; tests/stages composes them.
YAMLS = sorted(str(p.relative_to(CONF)) for p in CONF.rglob("*.yaml") if p.parent.name != "pipeline")
BASES = ("base", "data/common", "data/chat", "data/preference")  # shared by options
SWEEPS = "sweep/"  # read with -m only: tests/sweeps/test_sweep.py
OPTIONS = [n for n in YAMLS if "/" in n and not n.startswith(SWEEPS) and not n.removesuffix(".yaml").endswith(BASES)]
# The options of groups that have no other option.
DEFAULTS = [o for o in OPTIONS if sum(other.startswith(f"{o.split('/')[0]}/") for other in OPTIONS) == 1]
# Small shapes for models of any size; each is set if the model's own yaml gives a number for it.
SHRUNK = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ROWS_A_STEP = ["data.seq_len=32", "data.global_batch_size=6", "data.micro_batch_size=2"]
# Conversations in plain text, since a tokenizer of bytes has no special tokens for turns.
CHAT = ["objective=sft", "data.chat_template=vicuna", "data.seq_len=512", "data.val_fraction=0.1",
        "model.max_position_embeddings=512"]  # fmt: skip
GRPO = ["objective.group_size=2", "objective.max_new_tokens=4"]
REWARDS = {"custom": ["reward._target_=lmtrain.rewards.text.Equal"],
           "sum": ["reward.parts={a: {_target_: lmtrain.rewards.text.Equal, weight: 2}}"]}  # fmt: skip
MEMORY = ["memory.layers=[0,1]", "memory.num_chapters=4", "memory.top_k=2", "memory.memory_dim=16"]
PLAIN = ["trainer.precision=32-true", "trainer.log_every_n_steps=1", "callbacks.samples.max_new_tokens=4"]


def test_how_many_there_are() -> None:
    print(f"{len(YAMLS)} yamls under conf/, {len(OPTIONS)} of them options of a group")
    assert len(YAMLS) > 60
    bases = {name.split("/")[0] for name in YAMLS if name.endswith("/base.yaml")}
    for group in bases:  # a base is what its options share, and is run with each of them
        assert any("base" in str(yaml.safe_load((CONF / o).read_text()).get("defaults")) for o in in_group(group))


@pytest.mark.parametrize(
    "words",
    [
        ["objective=dpo", "optimizer=muon", "schedule=wsd", "optimizer.lr=1", "callbacks.ema.enabled=true"],
        ["experiment=grpo_tools", "data.path=[a, b]", "optimizer.groups=[{pattern: wpe, lr: 1}]", "trainer.devices=2"],
        ["model=memory_nano", "data=text_mixture", "data.mixture=[{path: a, weight: 2}, {path: b, max_epochs: 1}]"],
        ["objective=distill", "peft=lora", "logger=wandb", "model.extra={a: {b: [1, 2.5, null, true]}}"],
    ],
    ids=lambda words: words[0],
)
def test_values_of_the_right_types_are_read_as_omegaconf_reads_them(words: list[str]) -> None:
    plain = interpolations.resolved(config.compose(words))
    found = sections.classes(plain)
    schema = OmegaConf.structured(Config)
    for section, options in found.items():
        schema[section] = OmegaConf.structured(options)
    theirs = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(plain)))
    ours = sections.typed(Config, plain, found)
    assert repr(ours) == repr(theirs)  # in which 1, 1.0 and True differ
    ours.callbacks.extra.append(ours.model.extra)
    ours.model.extra["new"] = 1
    assert plain == interpolations.resolved(config.compose(words)), "it is a copy"


@pytest.mark.parametrize(
    ("kind", "value"),
    [(int, "1"), (int, True), (int, 1.0), (int, None), (float, True), (float, 10**400), (str, 1), (str, "???"),
     (bool, 1), (int | str, 1.0), (list[str], "a"), (list[str], [1]), (dict[str, Any], [1]), (dict[str, Any], {1: 2}),
     (Any, (1,)), (Any, [{"a": "???"}]), (EmaConfig, {"enabled": True}), (EmaConfig, None), (EmaConfig, {"a": 1})],
)  # fmt: skip
def test_other_values_are_left_to_omegaconf(kind: Any, value: Any) -> None:
    with pytest.raises((KeyError, OverflowError, TypeError)):
        sections.typed(kind, value)


def in_group(group: str) -> list[str]:
    return [name for name in OPTIONS if name.startswith(f"{group}/")]


@pytest.fixture(scope="module")
def material(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the corpus in every format, a dataset repository, and tiny models with their tokenizer, by name."""
    folder = tmp_path_factory.mktemp("material")
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), folder / "rows.parquet")
    prepared = run("prepare", *TINY, "data=text", f"data.path={corpus}", f"data.cache_dir={folder}/cache")
    assert prepared.code == 0, prepared.err
    trained = train_tiny(corpus, EXPORT, f"run.dir={folder}/run")
    assert trained.code == 0, trained.err
    return {
        "text": corpus,
        "jsonl": folder / "rows.jsonl",
        "parquet": folder / "rows.parquet",
        "bins": next((folder / "cache").glob("*-bytes-*")),
        **{option: write_rows(folder / f"{option}.jsonl", option) for option in ROWS},
        "prompts": prompts(folder / "prompts.jsonl"),
        "repository": repository(folder / "repository", texts),
        "run": folder / "run",
        "model": folder / "run" / "export",
        "pretrained": save_pretrained(folder / "pretrained", max_position_embeddings=512),
        "judge": judge(folder),
    }


def judge(folder: Path) -> Path:
    """Saves a model with an untrained scalar head and returns its folder."""
    base = save_pretrained(folder / "judge", max_position_embeddings=512)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(base)
    return base


def prompts(file: Path) -> Path:
    """Writes questions with the columns that each reward reads, and returns the file."""
    rows_ = (
        {"prompt": f"{i}+1=", "question": f"{i}+1=", "answer": f"#### {i + 1}", "tests": "pass"} for i in range(40)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_))
    return file


def repository(folder: Path, texts: list[str]) -> Path:
    """Writes a dataset repository in the hub's layout, with the configurations that the yamls of conf/data name."""
    folder.mkdir()
    data_files = [{"split": split, "path": f"{split}.jsonl"} for split in ("train", "validation")]
    names = {in_yaml(o, "config_name") or "default" for o in in_group("data")}
    configs = [{"config_name": name, "data_files": data_files} for name in sorted(names)]
    (folder / "README.md").write_text("---\n" + yaml.safe_dump({"configs": configs}) + "---\n")
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def data_of(experiment: str) -> str:
    """Returns the option of conf/data whose rows suit a fine-tuning experiment."""
    return {"sft_gsm8k": "gsm8k"}.get(experiment, "preference_jsonl" if "dpo" in experiment else "chat_jsonl")


def composed(name: str) -> dict:
    """Returns the composed tree with this option chosen, without resolving values."""

    group, option = name.removesuffix(".yaml").split("/")
    own = ["model=pretrained"] if name == "tokenizer/pretrained.yaml" else []  # whose tokenizer it uses
    return OmegaConf.to_container(config.compose([f"{group}={option}", *own]))  # type: ignore[return-value]


def in_yaml(name: str, key: str) -> Any:
    """Returns what a data option's yaml or base has for a key; composing would take a hundred times as long."""
    tree = yaml.safe_load((CONF / name).read_text())
    bases = [base for base in tree.get("defaults", ()) if base != "_self_"]
    return tree.get(key) if key in tree or not bases else in_yaml(f"data/{bases[0]}.yaml", key)


def special_of(name: str, material: dict[str, Path]) -> list[str]:
    """Returns what an option needs beside the settings of a tiny run."""
    return {
        "tokenizer/gpt2": [f"tokenizer.name_or_path={material['model']}"],
        "tokenizer/hub": [f"tokenizer.name_or_path={material['model']}"],
        "tokenizer/pretrained": ["model=pretrained", f"model.name_or_path={material['model']}"],
        "schedule/custom": ["schedule._target_=test_keys.Flat", "run.allow_target=[test_keys]"],
        "optimizer/custom": ["optimizer._target_=torch.optim.RAdam", "+optimizer.betas=[0.9,0.95]"],
        "memory/bank": MEMORY,
        "tokenizer/bpe": ["tokenizer.vocab_size=300"],
        "logger/wandb": ["logger.wandb.mode=offline"],
        "logger/many": ["logger.wandb.mode=offline"],
    }.get(name.removesuffix(".yaml"), [])


def overrides_of(name: str, material: dict[str, Path]) -> list[str]:
    """Returns the overrides that make a run of this option take about a second."""
    group, option = name.removesuffix(".yaml").split("/")
    tree = composed(name)
    text = ["data=text", f"data.path={material['text']}"]
    quick = [*PLAIN, *TWO_STEPS]
    if group == "model":
        shape = [f"model.{k}={v}" for k, v in SHRUNK.items() if tree["model"].get(k) is not None]
        named = [f"model.name_or_path={material['model']}"] if option == "pretrained" else ["tokenizer=bytes"]
        if option == "custom":
            of_llama = [k for k in SHRUNK if "expert" not in k and "moe" not in k and k != "max_position_embeddings"]
            shape = ["model.max_position_embeddings=64", *(f"+model.{k}={SHRUNK[k]}" for k in of_llama)]
            named += ["model._target_=transformers.LlamaForCausalLM"]
        memory = MEMORY if option.startswith("memory") else []
        return [*ROWS_A_STEP, *quick, *text, "logger=none", *shape, *named, *memory]
    tiny = tiny_run() + [EXPORT, SAMPLES] * (group in ("callbacks", "objective", "reward", "tokenizer"))
    if "prompt_rows" in tree["data"]["rows"] or group == "reward" or option == "grpo":
        own = ["objective=grpo", "data=prompts_jsonl", "data.source=files", f"data.path={material['prompts']}", *GRPO]
        if group == "reward" and option == "none":
            return [*tiny, *text]
        if group == "experiment":
            asked = ["reward=exact_number"] if option == "grpo_small" else []  # it is made for rewards of one's own
            if option == "grpo_tools":
                asked = ["data.chat_template=chatml", "tokenizer.add_tokens=[<|im_start|>,<|im_end|>]"]
            return [*ROWS_A_STEP, *quick, *own[2:], *asked, f"model.name_or_path={material['pretrained']}",
                    "logger=none", "data.val_fraction=0.1", "schedule.warmup_steps=1"]  # fmt: skip
        judge = {"model": [f"reward.name_or_path={material['judge']}"]}
        chosen = {**REWARDS, **judge}.get(option, []) if group == "reward" else ["reward=exact_number"]
        return [*tiny, *own, *chosen]
    if group == "experiment" and tree["model"]["init"] == "pretrained":
        return [*ROWS_A_STEP, *quick, *CHAT[1:-1], "data.source=files", f"model.name_or_path={material['pretrained']}",
                f"data.path={material[data_of(option)]}", "logger=none", "schedule.warmup_steps=1"]  # fmt: skip
    if group == "experiment":
        shape = [f"model.{k}={v}" for k, v in SHRUNK.items() if tree["model"].get(k) is not None]
        return [*ROWS_A_STEP, *quick, *shape, f"data.path={material['text']}", "tokenizer=bytes", "logger=none",
                "schedule.warmup_steps=1", "data.val_fraction=0.1"]  # fmt: skip
    if group == "data" and option == "text_mixture":
        path = material["text"]
        return [*tiny, f"data.mixture=[{{path: {path}, weight: 2}}, {{path: {path}, max_epochs: 1}}]"]
    if group == "data" and option == "mixture":
        return [*tiny, *CHAT, f"data.mixture=[{{path: {material['chat_jsonl']}, weight: 0.5}}]"]
    if group == "data" and option in ROWS:
        objective = {"pairs": ["objective=dpo"], "conversations": CHAT}.get(tree["data"]["rows"], ["objective=kto"])
        return [*tiny, *CHAT, *objective, "data.source=files", f"data.path={material[option]}"]
    if group == "peft" and option != "none":
        return [*ROWS_A_STEP, *quick, *text, "logger=none", "model=pretrained",
                f"model.name_or_path={material['pretrained']}", *(MEMORY if "memory" in option else [])]  # fmt: skip
    if group == "objective" and option != "causal_lm":
        if option == "custom":
            return [*tiny, *text, "objective._target_=lmtrain.objectives.causal_lm.CausalLM"]
        if option == "mdlm":
            return [*tiny, *text]
        if option == "distill":
            teacher = f"objective.teacher={material['pretrained']}"
            return [*tiny, *CHAT[1:], "data=chat_jsonl", f"data.path={material['chat_jsonl']}", teacher]
        data = {"sft": "chat_jsonl", "kto": "unpaired_jsonl"}.get(option, "preference_jsonl")
        return [*tiny, *CHAT[1:], f"data={data}", f"data.path={material[data]}"]
    if group == "data":
        if option == "python_stdlib":
            return [*tiny, "data.num_samples=30"]
        if option in ("text", "jsonl", "parquet", "bins"):
            return [*tiny, f"data.path={material[option]}"]
        return [*tiny, f"data.name={material['repository']}", "data.val_fraction=0.1"]
    special = special_of(name, material)
    if option == "pretrained":
        return [*ROWS_A_STEP, *quick, *text, "logger=none", *special]
    if group not in ("budget", "callbacks", "chat", "checkpoint", "debug", "estimate", "evaluate", "export", "generate",
                     "inspect", "logger", "memory", "objective", "optimizer", "peft", "report", "router", "run",
                     "schedule", "tokenizer", "trainer", "tune"):  # fmt: skip
        pytest.fail(f"conf/{group} is new: say here how a run of its options is made small")
    return [*tiny, *text, *special]


def tiny_run() -> list[str]:
    return [*TINY, *TWO_STEPS]


BITSANDBYTES = ("bitsandbytes", 'pip install "lmtrain[bitsandbytes]"')
MATH_VERIFY = ("math_verify", "pip install 'lmtrain[math]'")
NEEDS = {
    "logger/mlflow.yaml": ("mlflow", 'pip install "lmtrain[mlflow]"'),
    "reward/math_verify.yaml": MATH_VERIFY,
} | dict.fromkeys(
    ("optimizer/adamw_8bit.yaml", "peft/qlora.yaml", "peft/qlora_8bit.yaml", "experiment/sft_smollm2_qlora.yaml"),
    BITSANDBYTES,
)


# Options that need a device, and what a run says where there is none.
ON_A_GPU = {
    "trainer/gpu.yaml": "sees no CUDA: set trainer.accelerator=cpu",
    "trainer/deepspeed.yaml": "trainer.strategy=deepspeed needs CUDA devices",
}


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


# Groups whose options go with any model: a run of a model has one of each.
ALONGSIDE = ("callbacks", "logger", "optimizer", "router", "schedule")


def runs_of_options() -> list[tuple[str, ...]]:
    """Returns the options of each run: one of every other group and, with models, those of ALONGSIDE."""
    free = [[o for o in in_group(group) if o not in {*NEEDS, *ON_A_GPU, *DEFAULTS}] for group in ALONGSIDE]
    rides = [tuple(filter(None, row)) for row in itertools.zip_longest(*free)]
    left, riding = iter(rides), {name for ride in rides for name in ride}
    assert len(rides) <= len(in_group("model"))
    alone = [name for name in OPTIONS if name not in riding and name not in DEFAULTS]
    return [(name, *(next(left, ()) if name.startswith("model/") else ())) for name in alone]


def chosen_by(names: tuple[str, ...]) -> list[str]:
    return [name.removesuffix(".yaml").replace("/", "=") for name in names]


@pytest.mark.parametrize(
    "names", thinned([(run,) for run in runs_of_options()], 8), ids=lambda n: " ".join(chosen_by(n))
)
@pytest.mark.usefixtures("hf_cache")
def test_every_option_runs(
    names: tuple[str, ...], material: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, choices = names[0], chosen_by(names)
    overrides = [*overrides_of(name, material), *(o for other in names[1:] for o in special_of(other, material))]
    groups = tuple(f"{choice.partition('=')[0]}=" for choice in choices)
    ended = run("train", *choices, *(o for o in overrides if not o.startswith(groups)))
    extra, advice = NEEDS.get(name, (None, None))
    if extra is not None and find_spec(extra) is None:
        assert ended.code == 2
        assert advice in ended.err
        pytest.skip(f"{extra} is not installed; the run says so: {ended.err.strip()}")
    if name in ON_A_GPU and not torch.cuda.is_available():
        assert ended.code == 2
        assert ON_A_GPU[name] in ended.err
        return
    assert ended.code == 0, ended.err
    print(f"{' '.join(choices)}: {ended.seconds:.2f} s")
    assert_a_step_was_trained(tmp_path, ended)


def test_the_only_options_of_their_groups_run(
    material: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options without alternatives, which every other run has too, run when they are typed, all in one run."""
    monkeypatch.chdir(tmp_path)
    chosen = [name.removesuffix(".yaml").replace("/", "=") for name in DEFAULTS]
    ended = run("train", *tiny_run(), EXPORT, SAMPLES, "data=text", f"data.path={material['text']}", *chosen)
    assert ended.code == 0, ended.err
    assert_a_step_was_trained(tmp_path, ended)


def assert_a_step_was_trained(folder: Path, ended: Ended) -> None:
    (metrics,) = folder.glob("outputs/*/metrics.jsonl")
    losses = [row["train/loss"] for row in rows(metrics) if "train/loss" in row]
    assert len(losses) == 2, ended.out
    assert all(np.isfinite(losses))
    assert json.loads((metrics.parent / "summary.json").read_text())["status"] == "finished"
    if not yaml.safe_load((metrics.parent / "config.yaml").read_text())["export"]["enabled"]:
        return
    export = metrics.parent / "export"
    assert (export / "model.safetensors").exists() or (export / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", [o for o in in_group("data") if in_yaml(o, "source") == "hub"])
def test_the_hubs_datasets_by_their_own_names(name: str) -> None:
    """A dataset of the hub that can't be fetched is named in the message, with an alternative."""
    data = composed(name)["data"]
    objective = "causal_lm" if "text_column" in data else "dpo" if data["rows"] == "pairs" else "sft"
    objective = "grpo" if "prompt_rows" in data["rows"] else objective
    ended = run("train", *TINY, *TWO_STEPS, f"data={Path(name).stem}", f"objective={objective}")
    assert ended.code == 2
    assert f"dataset '{data['name']}' can't be fetched" in ended.err
    assert "data.path=" in ended.err


@pytest.mark.parametrize(
    "name", thinned([o for o in in_group("model") if Path(o).stem not in ("pretrained", "custom")], 2)
)
def test_every_model_in_its_full_size(name: str) -> None:
    """Every model builds in full size on the meta device, and its yaml's comments give its number of parameters."""
    option = Path(name).stem
    checked = config.check(config.compose([f"model={option}"]))
    vocabulary = 1024 if option == "dial" else 4096 if option.endswith("nano") else 50257
    with torch.device("meta"):
        model = build_model(checked.model, vocabulary, 0, checked.data.seq_len)
    assert checked.model.name == option
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert model.config.vocab_size == embeddings.weight.shape[0]
    parameters = sum(p.numel() for p in model.parameters())
    said = [float(n) * {"M": 1e6, "G": 1e9}[u] for n, u in re.findall(r"(\d[\d.]*) ([MG]) ", (CONF / name).read_text())]
    print(f"{option}: {parameters:,} parameters")
    assert any(abs(parameters - n) < 0.05 * n for n in said), f"{parameters:,} is not in the comments of {name}"


def leaves(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields (dotted key, line) of every value."""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from leaves(value, f"{name}.")
        else:
            yield name, key.start_mark.line


def keys_of(name: str) -> list[tuple[str, bool]]:
    """Returns (full key, whether it has a comment on its line or above) for every value of a yaml."""
    text = (CONF / name).read_text()
    lines = text.splitlines()
    node = yaml.compose(text)
    is_global = "/" not in name or lines[0] == "# @package _global_"
    prefix = "" if is_global else name.split("/")[0] + "."
    found = []
    for key, line in leaves(node):
        if key.split(".")[0] in ("defaults", "hydra"):
            continue
        above = line - 1
        while above >= 0 and (not lines[above].strip() or lines[above].startswith("defaults:")):
            above -= 1
        comment_above = above >= 0 and lines[above].strip().startswith("#") and "@package" not in lines[above]
        found.append((prefix + key, comment_above or re.search(r"\s# \S", lines[line]) is not None))
    return found


KEYS = {name: keys_of(name) for name in YAMLS}
EXPLAINED = {key for keys in KEYS.values() for key, comment in keys if comment}


def test_every_key_is_explained() -> None:
    """Every key has a comment in its yaml or, where a preset only changes its value, in the yaml that defines it."""
    opened = tuple(f"{key}." for key, is_open in schema_keys() if is_open)
    for name in YAMLS:
        bare = [k for k, comment in KEYS[name] if not comment and k not in EXPLAINED and not k.startswith(opened)]
        assert not bare, f"conf/{name}: no comment says what {', '.join(bare)} is for"


def schema_keys() -> Iterator[tuple[str, bool]]:
    """Returns (dotted key, whether users may add keys below it) for every key of the schema."""
    objectives = [yaml.safe_load((CONF / name).read_text())["_target_"] for name in in_group("objective")]
    options = [get_class(target).Options for target in objectives if target is not None]
    beside = [key for made in options for key in keys_of_class(made, "objective.")]
    return ((key.name, str(key.type).startswith("dict")) for key in (*all_keys(), *beside))


def test_yaml_and_schema_have_the_same_keys() -> None:
    schema = dict(schema_keys())
    opened = [key for key, is_open in schema.items() if is_open]
    written = {key for keys in KEYS.values() for key, _ in keys}
    below = {key for key in written if any(key.startswith(f"{o}.") for o in opened)}
    assert written - below - set(schema) == set(), "in conf/ but not in schema.py"
    assert set(schema) - set(opened) - written == set(), "in schema.py but in no yaml"


def test_a_config_dir_of_ones_own(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of a user's config folder laid out like conf/ are used, suggested and checked like shipped ones."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine"
    (mine / "model").mkdir(parents=True)
    (mine / "model" / "wide.yaml").write_text("defaults: [gpt_nano, _self_]\nname: wide\nhidden_size: 48\n")
    (mine / "experiment").mkdir()
    (mine / "experiment" / "quick.yaml").write_text("# @package _global_\ntrainer: {max_steps: 1}\n")
    argv = [o for o in TINY if "hidden_size" not in o]
    base = ["data=text", f"data.path={corpus}", "--config-dir", "mine"]
    ended = run("train", *argv, *base, "model=wide", "experiment=quick", "run.name=mine")
    assert ended.code == 0, ended.err
    said = yaml.safe_load((tmp_path / "outputs" / "mine" / "config.yaml").read_text())
    assert (said["model"]["name"], said["model"]["hidden_size"], said["trainer"]["max_steps"]) == ("wide", 48, 1)
    ended = run("train", *base, "model=wid")
    assert ended.code == 2
    assert "did you mean model=wide?" in ended.err
    (mine / "experiment" / "wrong.yaml").write_text("# @package _global_\ntrainer: {max_stepz: 1}\n")
    ended = run("train", *base, "experiment=wrong")
    assert ended.code == 2
    assert "did you mean trainer.max_steps" in ended.err


def stable(path: Path) -> list[dict]:
    return [without_times(row) for row in rows(path)]


def test_runs_in_one_process_do_not_disturb_one_another(corpus: Path, tmp_path: Path) -> None:
    """The same command gives the same numbers whatever ran before it, and leaves handlers and settings as they were."""
    dropout = ["model.dropout=0.1", "trainer.max_steps=3", EXPORT, SAMPLES]
    before = process_state()
    assert train_tiny(corpus, *dropout, f"run.dir={tmp_path}/a").code == 0
    assert process_state() == before
    other = ["seed=5", "optimizer=lion", "tokenizer=char", "trainer.precision=bf16-mixed", "model.dropout=0.3"]
    assert train_tiny(corpus, *other, f"run.dir={tmp_path}/other").code == 0
    assert train_tiny(corpus, "model.hidden_size=33", f"run.dir={tmp_path}/refused").code == 2
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert train_tiny(corpus, *dropout, f"run.dir={tmp_path}/b").code == 0
    assert process_state() == before
    assert stable(tmp_path / "a" / "metrics.jsonl") == stable(tmp_path / "b" / "metrics.jsonl")
    assert (tmp_path / "a" / "samples.jsonl").read_text() == (tmp_path / "b" / "samples.jsonl").read_text()


def test_a_run_that_breaks_leaves_the_process_as_it_was(corpus: Path, tmp_path: Path) -> None:
    """An error in the middle of training, here in a user's callback, leaves the process state unchanged."""
    before = process_state()
    extra = ["callbacks.extra=[{_target_: inprocess.Breaks, at: 1}]", "run.allow_target=[inprocess]"]
    with pytest.raises(ZeroDivisionError):
        train_tiny(corpus, *extra, f"run.dir={tmp_path}/a")
    assert process_state() == before
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"


def process_state() -> dict:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    return {
        "handlers": [signal.getsignal(n) for n in numbers],
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        # Without what Lightning leaves, and what a command sets for the processes that it starts.
        "environ": {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "LMTRAIN_", "GOMP_"))},
        "folder": Path.cwd(),
    }


def test_interpolations_of_a_wrong_kind_are_refused() -> None:
    with pytest.raises(UserError, match="not found"):
        config.check(config.compose(["data.seq_len=${model.nothing}"]))
