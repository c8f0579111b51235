"""Notes under the plan: what a practitioner would say of the settings before the first step."""

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lmtrain.callbacks.system import has_nvml
from lmtrain.config import effect
from lmtrain.config.deepspeed import overruled
from lmtrain.config.growth import step_sizes
from lmtrain.config.precision import FP8, outside_fp8
from lmtrain.config.schema import Config
from lmtrain.distributed import ranks
from lmtrain.errors import UserError
from lmtrain.optim.skipping import can_skip
from lmtrain.strategies import sharding

if TYPE_CHECKING:
    from lmtrain.run.build import Run


def of_run(run: "Run") -> list[str]:
    """What a practitioner would say, looking at the plan."""
    c, corpus, notes = run.config, run.corpus, []
    epochs = step_sizes(c.data).before(run.total_steps) / len(corpus.train)
    if epochs > 8 and corpus.stream is None:
        notes.append(
            f"{epochs:.0f} passes over the training data: expect overfitting "
            f"(trainer.max_epochs=4 ends earlier; callbacks.early_stopping.enabled=true stops when it sets in)"
        )
    if unheard := overruled(c):
        notes.append(f"{c.trainer.deepspeed.config}: of it the run's own config overrules {', '.join(unheard)}")
    notes += for_mixtures(corpus.train, run.total_steps)
    notes += effect.inference_note(ranks.typed(), c)
    notes += unlikely(c, run.total_steps, os.cpu_count() or 1, effect.typed_keys(ranks.typed()))
    on_every_rank = sharding.why_on_every_rank(c)
    if run.trainer.world_size > 1 and on_every_rank is not None:
        notes.append(f"each of {run.trainer.world_size} ranks builds the whole model in host memory: {on_every_rank}")
    if c.trainer.accelerator == "cuda":
        notes += [*for_gpus(run), *not_measured()]
    if corpus.val is None:
        notes.append(
            f"there is no validation split: no val/loss, no best checkpoint ({corpus.how_to_validate(c.data)})"
        )
    if c.data.rows != "text" and leaves_out_bos(corpus.tokenizer):
        notes.append(
            f"the chat template doesn't write {corpus.tokenizer.bos_token}, which the tokenizer puts before plain "
            f"text: the model is trained without it, but llama.cpp (GGUF) begins every chat with it (docs/sft.md)"
        )
    return notes


def for_mixtures(rows: Any, total_steps: int) -> list[str]:
    """Of a mixture: weights that the run ends before, sources that are seen again and again."""
    mixture = getattr(rows, "mixture", None)
    if mixture is None:
        return []
    notes = [
        f"data.mixture: the weights of step {step:,} are not reached: the run has {total_steps:,} steps"
        for step in mixture.changes
        if step >= total_steps
    ]
    given = mixture.rows_given(mixture.step_sizes.before(total_steps))
    passes = [(source.name, n / source.rows) for source, n in zip(mixture.sources, given, strict=True)]
    often = ", ".join(f"{name} {number:.0f} times" for name, number in passes if number > 8)
    return [*notes, *([f"{often} over: its max_epochs in data.mixture limits it"] if often else [])]


def for_gpus(run: "Run") -> list[str]:
    """Settings that keep a GPU waiting, and what to set instead."""
    c, model, notes = run.config, run.objective.model, []
    if c.trainer.strategy != "deepspeed" and not can_skip(run.objective._optimizer):
        notes.append(
            f"each step waits for the GPU once, to know whether {c.optimizer.name} has to leave out a bad update "
            f"(adamw, muon, lion and adafactor do that by themselves)"
        )
    packed = c.data.isolate_documents or c.data.packing not in (None, "off") or c.objective.name == "dpo"
    if packed and c.model.attention == "slices":
        notes.append(
            "model.attention=slices reads where documents lie from the GPU, waiting for it with every micro-batch: "
            "model.attention=auto doesn't"
        )
    elif packed and model.attention_dropout > 0:
        notes.append(
            "with dropout on attention weights (model.dropout) packed documents are kept apart by a mask over whole "
            "rows: with model.dropout=0 flash attention computes only what lies within documents"
        )
    if model.has_router and not outside_fp8(c.trainer.precision).startswith("bf16"):
        notes.append(
            f"in {c.trainer.precision} experts are multiplied one after the other, waiting for the GPU in each layer: "
            f"trainer.precision=bf16-mixed multiplies them at once"
        )
    if c.trainer.precision == FP8 and not c.trainer.compile:
        notes.append(
            "trainer.precision=fp8 without torch.compile rounds to 8 bits in kernels of their own, which mostly takes "
            "longer than is gained: trainer.compile=true, or trainer.precision=bf16-mixed"
        )
    return notes


def not_measured() -> list[str]:
    """What records lack on a GPU of which nothing tells utilisation and power."""
    return [] if has_nvml() else ["gpu_utilization and gpu_watts are not logged: pip install nvidia-ml-py"]


def unlikely(c: Config, total_steps: int, cores: int, typed: Collection[str]) -> list[str]:
    """Values that can be meant, but rarely are; `typed`: the keys of the command line."""
    notes = []
    if c.optimizer.lr == 0:
        notes.append("optimizer.lr=0: nothing will be learned")
    warmup = c.schedule.warmup_steps or 0
    if warmup >= total_steps and c.schedule.name != "constant":
        notes.append(
            f"schedule.warmup_steps={warmup:,} of {total_steps:,} steps: the peak lr {c.optimizer.lr:g} is not reached "
            f"before the end (schedule.warmup_ratio=0.02)"
        )
    every = c.trainer.val_check_interval
    if every is not None and every > total_steps and "trainer.val_check_interval" in typed:
        notes.append(
            f"trainer.val_check_interval={every:,} is longer than the run: it validates once, after the last step"
        )
    if c.data.num_workers > cores:
        notes.append(
            f"data.num_workers={c.data.num_workers} on {cores} cores: they wait for each other ({cores} or fewer)"
        )
    return notes


def leaves_out_bos(tokenizer: Any) -> bool:
    """Whether a chat begins without the token that plain text begins with."""
    from lmtrain.data.chat.templates import own_template, user_turn

    template, plain = own_template(tokenizer), tokenizer("a")["input_ids"]
    if template is None or tokenizer.bos_token_id is None or plain[0] != tokenizer.bos_token_id:
        return False
    try:
        return user_turn(tokenizer, template, "a", None)[0] != tokenizer.bos_token_id
    except UserError:  # a template that takes no such turn
        return False
