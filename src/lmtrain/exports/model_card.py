"""The README.md of an export: a model card with hub metadata, from the run's config and its validation scores."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from lmtrain.config.override_text import leaves_of
from lmtrain.files import read_jsonl, read_regular
from lmtrain.run_folder.folder import brings_code, gives_rewards, loading_class, predicts_masked_tokens
from lmtrain.secrets import shown_in
from lmtrain.terminal import visible

_DONE = {"causal_lm": "pretrained", "sft": "fine-tuned on conversations", "dpo": "tuned on preferences",
         "reward": "which gives answers rewards, trained on preferences"}  # fmt: skip
_FURTHER = {**_DONE, "causal_lm": "trained further"}
# Rows of the settings table: label and config key.
_SETTINGS = (
    ("rows a step", "data.global_batch_size"), ("tokens a row", "data.seq_len"),
    ("optimizer", "optimizer.name"), ("learning rate", "optimizer.lr"), ("schedule", "schedule.name"),
    ("weight decay", "optimizer.weight_decay"), ("adapter", "peft.method"), ("adapter rank", "peft.r"),
    ("loss", "objective.loss"), ("beta", "objective.beta"), ("precision", "trainer.precision"), ("seed", "seed"),
)  # fmt: skip


HERE = '"."  # this folder, or its name on the hub'
_BEFORE_SHARING = (
    "Add what the data is and its licence, the model's own licence, and what it should not be used for: nothing of "
    "that is in a config."
)


def write(folder: Path, run_config: Path, *, chat: bool, parameters: int, step: int) -> None:
    """Writes <folder>/README.md.

    Args:
        run_config: config.yaml in the run's folder, next to metrics.jsonl.
        chat: whether the tokenizer has a chat template.
        parameters: number of parameters, including those of an adapter's base.
        step: the step of the exported weights.
    """
    adapter = (folder / "adapter_config.json").exists()
    config = dict(leaves_of(shown_in(yaml.safe_load(read_regular(run_config)))))  # by dotted key
    name, scores = run_config.parent.name, _scores(run_config.parent / "metrics.jsonl", step)
    if predicts_masked_tokens(folder):
        task, use = "fill-mask", _use_denoising()
    elif gives_rewards(folder):
        task, use = "text-classification", _use_rewards(folder, chat)
    else:
        task, use = "text-generation", _use(folder, chat)
    base = config.get("model.name_or_path")
    if adapter and _hub_name(base) is None:
        use += (
            f"\n\nThe adapter's base, `{_plain(Path(str(base)).name)}`, is not on the hub, and a copy of this folder "
            "on the hub names none: load the base as `base`, and then `peft.PeftModel.from_pretrained(base, folder)`."
        )
    metadata = _metadata(config, name, scores, adapter, task).to_yaml(line_break="\n")
    parts = [
        f"---\n{metadata}\n---",
        f"# {_plain(name)}",
        _words(config, parameters, adapter),
        "## Use",
        use,
        "## Training",
        _table([("steps", step), *((what, config.get(key)) for what, key in _SETTINGS)]),
        "`lmtrain_config.yaml` in the folder that lmtrain wrote holds every key: it is enough to train the model "
        "again. It names local paths, so it is left out of uploads.",
    ]
    if scores:
        parts += [f"## Validation at step {step:,}", _table(list(scores.items()))]
    parts += ["## Before you share it", _BEFORE_SHARING]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _metadata(config: dict[str, Any], name: str, scores: dict[str, float], adapter: bool, task: str) -> ModelCardData:
    base, dataset = _hub_name(config.get("model.name_or_path")), None
    if config.get("data.source") == "hub" and not config.get("data.path"):
        dataset = _hub_name(config.get("data.name"))
    data = dataset or "own"
    results = [EvalResult(task, data, data, key.removeprefix("val/"), value) for key, value in scores.items()]
    return ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task,
        tags=["lmtrain", str(config.get("objective.name"))],
        base_model=base,
        base_model_relation=base and ("adapter" if adapter else "finetune"),
        datasets=[dataset] if dataset else None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def _hub_name(name: Any) -> str | None:
    """Returns the name if it is a valid hub name; None for an existing local folder, whose path stays private."""
    if not isinstance(name, str) or Path(name).expanduser().exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _scores(metrics: Path, step: int) -> dict[str, float]:
    """Returns the val/ metrics of the validation at `step`, or {} if there was none."""
    found: dict[str, float] = {}
    for row in read_jsonl(metrics, b'"val/'):
        numbers = {k: v for k, v in row.items() if k.startswith("val/") and isinstance(v, int | float)}
        found = numbers if numbers and row["step"] == step else found
    return found


def _words(config: dict[str, Any], parameters: int, adapter: bool) -> str:
    base = config.get("model.name_or_path") if config.get("model.init") == "pretrained" else None
    objective = str(config.get("objective.name"))
    began = f"`{_plain(_hub_name(base) or Path(str(base)).name)}`, " if base else ""
    kind = "An adapter of " if adapter else "" if began else f"A {_plain(config.get('model.name'))} model "
    done = (_FURTHER if base else _DONE).get(objective, f"trained (objective {_plain(objective)})")
    data = _data_name(config)
    return (
        f"{kind}{began}{'of ' if not began else ''}{parameters:,} parameters, {done} (`{_plain(data)}`) with "
        f"{_program()}."
    )


def _program() -> str:
    try:
        return f"lmtrain {version('lmtrain')}"
    except PackageNotFoundError:  # started from its source, by PYTHONPATH
        return "lmtrain"


def _data_name(config: dict[str, Any]) -> Any:
    path = config.get("data.path")
    if not path:
        return config.get("data.name") or config.get("data.source")
    data = path if isinstance(path, str) else " and ".join(map(str, path))
    # Only the path of a URL: its query may contain a signature that grants access.
    return Path(urlsplit(data).path if "://" in data else data).name


def reader(folder: Path) -> str:
    """Returns the call that loads an exported folder."""
    package, cls = loading_class(folder)
    trust = " with trust_remote_code=True" if brings_code(folder) else ""
    return f"{'peft.' * (package == 'peft')}{cls}.from_pretrained{trust}"


def loading_code(folder: Path, named: str) -> str:
    """Returns Python code that loads the model and the tokenizer of the folder; `named` is the name it has there.

    An adapter's folder has no config of the model, so the code sets what a reward adapter was trained with.
    """
    package, cls = loading_class(folder)
    between = "\nfrom transformers import " if package == "peft" else ", "
    trust = ", trust_remote_code=True" if brings_code(folder) else ""  # lets transformers run the code in this folder
    rewards = package == "peft" and gives_rewards(folder)
    return (
        f"from {package} import {cls}{between}AutoTokenizer\n\n"
        f"folder = {named}\n"
        f"model = {cls}.from_pretrained(folder{', num_labels=1' * rewards}{trust})\n"
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})"
        + "\nmodel.config.pad_token_id = tokenizer.pad_token_id  # where an answer ends"
        * rewards
    )


def _python(folder: Path, lines: str) -> str:
    """Returns a block of Python code that loads the model and the tokenizer of the folder and then runs `lines`."""
    return f"```python\n{loading_code(folder, HERE)}\n{lines}\n```"


def _use(folder: Path, chat: bool) -> str:
    asked = (
        'messages = [{"role": "user", "content": "..."}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)'
        if chat
        else 'inputs = tokenizer("Once upon a time", add_special_tokens=False, return_tensors="pt")'
    )
    given = 'input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]'
    lines = f"{asked}\noutput = model.generate({given}, max_new_tokens=100)\nprint(tokenizer.decode(output[0]))"
    return _python(folder, lines)


def _use_rewards(folder: Path, chat: bool) -> str:
    given = (
        'messages = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]\n'
        'inputs = tokenizer.apply_chat_template([messages], padding=True, return_tensors="pt", return_dict=True)'
        if chat
        else 'inputs = tokenizer(["a prompt and its answer"], padding=True, return_tensors="pt")'
    )
    lines = (
        f'{given}\nscores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits\n'
        "print(scores[:, 0].tolist())  # one reward per conversation"
    )
    return (
        "This model gives an answer a reward: one number, the higher the better; only differences between answers to "
        f"the same prompt mean something. Batches are padded on the right.\n\n{_python(folder, lines)}"
    )


def _use_denoising() -> str:
    return (
        "This model predicts masked tokens from the tokens on both sides of them (masked diffusion). **It does not "
        "write from left to right**: what `model.generate` of transformers and servers of causal models make of it is "
        "noise. Its config says `is_causal: false`, and `mask_token_id` is what stands for a hidden token. lmtrain "
        'writes texts with it:\n\n```\npython -m lmtrain.generate THIS_FOLDER generate.prompt="Once upon a time"\n'
        "```\n\nFrom Python, what it predicts for masked tokens:\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this folder, or its name on the hub\n'
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'ids = tokenizer("Once upon a time", add_special_tokens=False, return_tensors="pt")["input_ids"]\n'
        "ids[0, 1] = model.config.mask_token_id\n"
        "print(tokenizer.decode(model(ids).logits[0, 1, :len(tokenizer)].argmax()))\n```"
    )


def _table(rows: list[tuple[str, Any]]) -> str:
    shown = [(name, value) for name, value in rows if value not in (None, "none")]
    lines = [f"| {_plain(name)} | {_plain(f'{v:.6g}' if isinstance(v, float) else v)} |" for name, v in shown]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _plain(value: Any) -> str:
    """Returns the value as one line of text, with the markup of tables, code and HTML neutralized."""
    text = " ".join(visible(str(value)).split())
    return text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
