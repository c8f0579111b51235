"""The part of the typed config that verbs other than train read; see schema.py. None of it shapes a run."""

from dataclasses import dataclass
from typing import Annotated, Any

from lmtrain.config.constraints import SHOWN, above_zero, at_least, choice, name_of_file, not_negative, share


@dataclass(kw_only=True)
class GenerateConfig:
    prompt: Annotated[str, SHOWN]
    prompts_file: Annotated[str | None, SHOWN]
    out: Annotated[str | None, SHOWN]
    batch_size: Annotated[int, SHOWN, at_least(1)]
    chat: Annotated[bool | str, SHOWN, choice("auto")]
    system_prompt: Annotated[str | None, SHOWN]
    num_samples: Annotated[int, SHOWN, at_least(1)]
    max_new_tokens: Annotated[int, SHOWN, at_least(1)]
    temperature: Annotated[float, SHOWN, not_negative]
    top_k: Annotated[int | None, SHOWN, at_least(1)]
    checkpoint: Annotated[str, SHOWN]


@dataclass(kw_only=True)
class InspectConfig:
    split: Annotated[str, SHOWN, choice("train", "val")]
    samples: Annotated[int, SHOWN, not_negative]
    tokens: Annotated[int, SHOWN, at_least(1)]
    text: Annotated[str | None, SHOWN] = None  # shows what tokens read of a memory in its place
    html: Annotated[str | None, SHOWN]


@dataclass(kw_only=True)
class EvaluateConfig:
    data: Annotated[str, SHOWN, choice("auto", "run", "named")]
    checkpoint: Annotated[str, SHOWN]
    against: Annotated[str | None, SHOWN]
    reference: Annotated[str | None, SHOWN]
    name: Annotated[str | None, SHOWN, name_of_file]
    dir: Annotated[str | None, SHOWN]
    limit: Annotated[int | None, SHOWN, at_least(1)]
    context: Annotated[int | None, SHOWN, at_least(2)]
    stride: Annotated[int | None, SHOWN, at_least(1)]
    start_token: Annotated[bool, SHOWN]
    batch_size: Annotated[int, SHOWN, at_least(1)]
    precision: Annotated[str, SHOWN, choice("float32", "bfloat16")]
    answers: Annotated[int, SHOWN, not_negative]
    max_new_tokens: Annotated[int, SHOWN, at_least(1)]
    metrics: Annotated[list[Any], SHOWN]
    resamples: Annotated[int, SHOWN, at_least(1)]
    tasks: Annotated[list[str], SHOWN]
    task_folder: Annotated[str | None, SHOWN]
    fewshot: Annotated[int | None, SHOWN, not_negative]
    chat: Annotated[bool, SHOWN]


@dataclass(kw_only=True)
class EstimateConfig:
    device: Annotated[str | None, SHOWN]
    headroom: Annotated[float, SHOWN, share]
    tokens_per_s: Annotated[float | None, SHOWN, above_zero]
    mfu: Annotated[float, SHOWN, above_zero]


@dataclass(kw_only=True)
class ReportConfig:
    enabled: Annotated[bool, SHOWN]


@dataclass(kw_only=True)
class TuneConfig:
    lr: Annotated[bool, SHOWN]
    micro_batch_size: Annotated[bool, SHOWN]
    apply: Annotated[bool, SHOWN]
    steps: Annotated[int, SHOWN, at_least(20)]
    min_lr: Annotated[float | None, SHOWN, above_zero]
    max_lr: Annotated[float | None, SHOWN, above_zero]
    smoothing: Annotated[float, SHOWN, share]
    diverged: Annotated[float, SHOWN, above_zero]
    dir: Annotated[str | None, SHOWN]
