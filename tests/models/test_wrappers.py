"""Multimodal wrappers: their language model is trained, their towers are left alone, and the export is whole."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import AutoPeftModel, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from family_variants import ALWAYS
from inprocess import message, run, stops_at, train_tiny
from lmtrain.checkpoints import store
from lmtrain.errors import UserError
from lmtrain.exports.hf_folder import logits
from lmtrain.models.probe import shrink
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import thinned
from tiny_pretrained import SHORT, WRAPPERS, load_pretrained, save_wrapper

IDS = torch.arange(3, 35)[None]
ELSEWHERE = ("vision", "visual", "projector")  # in the names of what text doesn't use


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that saves a family's wrapper, once."""
    made: dict[str, Path] = {}

    def base(family: str) -> Path:
        if family not in made:
            made[family] = save_wrapper(tmp_path_factory.mktemp("base") / family, family)
        return made[family]

    return base


def train(corpus: Path, base: Path, run_dir: Path, *extra: str) -> Any:
    done = run("train", *SHORT, f"data.path={corpus}", f"model.name_or_path={base}", f"run.dir={run_dir}", *extra)
    assert done.code == 0, done.err
    return done


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def check_whole(base: Path, export: Path, changed: int) -> None:
    """Checks that an export has the base's tensors, of which `changed` differ, and none outside the language model."""
    before, after = stored(base), stored(export)
    assert before.keys() == after.keys()
    differ = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    untrained = {name for name in before if any(part in name for part in ELSEWHERE)}
    assert untrained
    assert len(differ) == changed
    assert not differ & untrained
    assert all(after[name].dtype == before[name].dtype for name in untrained)
    assert (export / "preprocessor_config.json").read_bytes() == (base / "preprocessor_config.json").read_bytes()


@pytest.mark.parametrize("family", thinned(WRAPPERS, 4))
def test_lora_stays_in_the_language_model(family: str, bases: Any, corpus: Path, tmp_path: Path) -> None:
    base = bases(family)
    done = train(corpus, base, tmp_path / "run", "peft=lora", "export.merge=true")
    assert "kept as they are" in done.out
    assert "no gradient reaches" not in done.out
    folder = RunDir(tmp_path / "run")
    live, _, _ = trained.from_run(folder, "last", {})
    expected = logits(live, IDS)

    weights = load_file(folder.export / "adapter_model.safetensors")
    assert weights
    assert not any(part in name for name in weights for part in ELSEWHERE)
    whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    before = logits(whole, IDS)
    on_whole = PeftModel.from_pretrained(whole, folder.export)
    adapted = {name for name, module in on_whole.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {name.partition(".lora_A")[0] for name in weights if ".lora_A" in name}
    torch.testing.assert_close(logits(on_whole.get_base_model(), IDS), expected, rtol=1e-4, atol=1e-4)
    assert (expected - before).abs().max() > 1e-3
    assert type(AutoPeftModel.from_pretrained(folder.export).get_base_model()) is type(whole)

    merged = AutoModelForImageTextToText.from_pretrained(folder.export_merged, dtype=torch.float32)
    torch.testing.assert_close(logits(merged, IDS), expected, rtol=1e-4, atol=1e-4)
    check_whole(base, folder.export_merged, len(adapted))


def test_training_in_full_resumes_and_exports_every_tensor(bases: Any, corpus: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_wrapper(base, "qwen3_5")
    unread = {"mtp.fc.weight": torch.randn(4, 8, dtype=torch.bfloat16)}  # transformers ignores a draft head's tensors
    save_file({**stored(base), **unread}, base / "model.safetensors", metadata={"format": "pt"})
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    train(corpus, base, whole.path)
    plan = whole.plan.read_text()
    assert "kept as they are" in plan
    assert "of visual" in plan
    stopped = run(
        "train", *SHORT, f"data.path={corpus}", f"model.name_or_path={base}", f"run.dir={parts.path}", *stops_at(2)
    )
    assert not parts.export.exists(), stopped.err
    train(corpus, base, parts.path, "run.resume=auto")
    first, second = (store.load_weights(folder.checkpoints / "last") for folder in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    text = {name for name in stored(base) if "language_model" in name or name.startswith("lm_head")}
    check_whole(base, parts.export, len(text))
    assert torch.equal(stored(parts.export)["mtp.fc.weight"], unread["mtp.fc.weight"])
    live, _, _ = trained.from_run(parts, "last", {})
    read = AutoModelForImageTextToText.from_pretrained(parts.export, dtype=torch.float32)
    torch.testing.assert_close(logits(read, IDS), logits(live, IDS), rtol=1e-5, atol=1e-5)
    texts = [run("generate", f"run_dir={where}", "generate.prompt=It was", "generate.temperature=0.0",
                 "generate.max_new_tokens=8") for where in (parts.path, parts.export)]  # fmt: skip
    assert texts[0].code == texts[1].code == 0
    assert texts[0].out == texts[1].out
    scored = run(
        "evaluate",
        f"run_dir={parts.export}",
        "data=text",
        f"data.path={corpus}",
        "trainer.accelerator=cpu",
        "data.seq_len=32",
    )
    assert scored.code == 0, scored.err


def test_an_adapter_of_a_wrapper_is_trained_further(bases: Any, corpus: Path, tmp_path: Path) -> None:
    base = bases("gemma3")
    more = ["peft=lora", "peft.modules_to_save=[embed_tokens]"]
    train(corpus, base, tmp_path / "first", *more)
    adapter = RunDir(tmp_path / "first").export
    train(
        corpus,
        base,
        tmp_path / "second",
        "peft=lora",
        f"peft.adapter={adapter}",
        "trainer.max_steps=1",
        "optimizer.lr=0",
    )
    first, second = (
        load_file(tmp_path / name / "export" / "adapter_model.safetensors") for name in ("first", "second")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    on_whole = AutoPeftModel.from_pretrained(adapter).float().get_base_model()
    live, _ = trained.load(str(adapter), "last", {})
    torch.testing.assert_close(logits(on_whole, IDS), logits(live.float(), IDS), rtol=1e-5, atol=1e-5)


def test_a_template_of_the_processor_is_the_tokenizers(bases: Any, tmp_path: Path) -> None:
    from lmtrain.config.schema_data import TokenizerConfig
    from lmtrain.data import tokenizers

    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    for file in ("chat_template.json", "processor_config.json"):
        base = save_wrapper(tmp_path / file, "gemma3")
        (base / file).write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        cfg = TokenizerConfig(kind="hub", name_or_path=str(base))
        found = tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
        assert found.chat_template == template


def test_a_language_model_that_is_no_causal_one_of_transformers_is_refused(corpus: Path, tmp_path: Path) -> None:
    CONFIG_MAPPING["qwen3_vl"]().save_pretrained(tmp_path)
    done = run("train", *SHORT, f"data.path={corpus}", f"model.name_or_path={tmp_path}", "tokenizer=bytes")
    assert done.code == 2
    assert "qwen3_vl reads more than text, and its language model (qwen3_vl_text) is not one" in message(done.err)


REFUSED = {
    "blip-2": "Blip2ForConditionalGeneration can't read text alone: its forward asks for pixel_values",
    "cohere2_vision": "leaves out its language model's logit_scale",
    "paligemma": "can't be trained to predict the next token: tokens see those that come after them",
    "pi0": "pi0 reads more than text, and its language model",
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_wrapper_whose_text_is_no_plain_text_is_refused(family: str, tmp_path: Path) -> None:
    shrink(CONFIG_MAPPING[family](), ALWAYS).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=REFUSED[family]), torch.device("meta"):
        load_pretrained(tmp_path, 64)


class Idle(pl.Callback):
    """A callback that gives the model a parameter without which the loss is computed."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.model.model.idle = torch.nn.Parameter(torch.ones(3))


IDLE = [f"callbacks.extra=[{{_target_: {__name__}.Idle}}]", f"run.allow_target=[{__name__}]", "export.enabled=false"]


def test_a_parameter_without_a_gradient_is_named(corpus: Path, tmp_path: Path) -> None:
    done = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", *IDLE)
    assert done.code == 0
    assert "note: no gradient reaches idle" in done.out
    assert "no gradient" not in train_tiny(corpus, f"run.dir={tmp_path / 'other'}", "export.enabled=false").out


@pytest.mark.slow
def test_ranks_that_would_wait_for_a_gradient_say_so(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "helpers"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    ranks = ["trainer.accelerator=cpu", "trainer.devices=2", "data.global_batch_size=8"]
    done = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", *IDLE, *ranks)
    assert done.code == 1
    assert "no gradient reaches idle" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_what_one_does(strategy: str, bases: Any, corpus: Path, tmp_path: Path) -> None:
    base = bases("gemma3")
    exported = []
    for devices in (1, 2):
        more = [f"trainer.devices={devices}", f"trainer.strategy={strategy}"][: 2 * devices - 2]
        train(corpus, base, tmp_path / f"{devices}", "trainer.accelerator=cpu", *more)
        check_whole(base, tmp_path / f"{devices}" / "export", 28)
        exported.append(stored(tmp_path / f"{devices}" / "export"))
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, rtol=1e-4, atol=1e-5)
