"""The README.md of an export: a model card with hub metadata, from the run's config and its validation scores.

Its text and code are the Jinja templates beside this file.
"""

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from lmtrain.adapters.exported import brings_code, gives_rewards, loading_class, predicts_masked_tokens
from lmtrain.config import safe_yaml
from lmtrain.config.override_text import leaves_of
from lmtrain.files import read_jsonl, read_regular
from lmtrain.secrets import shown_in
from lmtrain.terminal import visible

HERE = '"."  # this folder, or its name on the hub'


def write(folder: Path, run_config: Path, *, chat: bool, begins: bool, parameters: int, step: int) -> None:
    """Writes <folder>/README.md.

    Args:
        run_config: config.yaml in the run's folder, next to metrics.jsonl.
        chat: whether the tokenizer has a chat template.
        begins: whether it puts something before a text.
        parameters: number of parameters, including those of an adapter's base.
        step: the step of the exported weights.
    """
    adapter = (folder / "adapter_config.json").exists()
    config = dict(leaves_of(shown_in(safe_yaml.plain(read_regular(run_config)))))  # by dotted key
    name, scores = run_config.parent.name, scores_at(run_config.parent / "metrics.jsonl", step)
    # The hub's name of what the model does.
    task = "text-generation"
    if predicts_masked_tokens(folder):
        task = "fill-mask"
    elif gives_rewards(folder):
        task = "text-classification"
    base = config.get("model.name_or_path") if config.get("model.init") == "pretrained" else None
    text = _PAGES.get_template("model_card.jinja").render(
        metadata=_metadata(config, name, scores, adapter, task).to_yaml(line_break="\n"),
        name=name,
        config=config,
        parameters=parameters,
        adapter=adapter,
        base=base and (_hub_name(base) or Path(str(base)).name),
        base_is_local=_hub_name(base) is None,
        data=_data_name(config),
        version=next((made.version for made in distributions(name="lmtrain")), ""),  # none if run from its source
        task=task,
        chat=chat,
        begins=begins,
        stacked_experts=adapter and _adapts_stacked_experts(folder),
        loading_code=loading_code(folder, HERE),
        scores=scores,
        step=step,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _adapts_stacked_experts(folder: Path) -> bool:
    """Returns whether an adapter is on the one tensor that holds a matrix of every expert."""
    adapted = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("target_parameters") or []
    return any(not name.endswith("weight") for name in adapted)


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


def scores_at(metrics: Path, step: int | None) -> dict[str, float]:
    """Returns the val/ metrics of the validation at `step` that metrics.jsonl has, or {} if there was none."""
    rows = [row for row in read_jsonl(metrics, b'"val/') if row.get("step") == step]
    return {k: v for row in rows for k, v in row.items() if k.startswith("val/") and isinstance(v, int | float)}


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
    rewards = package == "peft" and gives_rewards(folder)
    values = {"package": package, "cls": cls, "named": named, "rewards": rewards, "trust": brings_code(folder)}
    return _PAGES.get_template("loading_code.jinja").render(values)


def _plain(value: Any) -> str:
    """Returns the value as one line of text, with the markup of tables, code and HTML neutralized."""
    text = " ".join(visible(str(value)).split())
    return text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), trim_blocks=True, keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
)  # fmt: skip
_PAGES.filters["plain"] = _plain
