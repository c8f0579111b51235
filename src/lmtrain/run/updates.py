"""A fine-tune planned in examples and updates (budget.updates): batch, epochs and learning rate from data and model.

Rows are packed, so a batch of 16 rows may be 250 short examples, and 300 examples three updates, which teach nothing.
The number of examples per update, of passes and the learning rate therefore follow from the number of examples and the
size of the model, by the table below, compared with others in benchmarks/updates.py (benchmarks/RESULTS.md).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lmtrain import terminal
from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.config.batch import nearest_divisor, step_sizes
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.proposers import LENGTHS, positions_of
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.hub import optional_file
from lmtrain.distributed import devices
from lmtrain.errors import UserError
from lmtrain.models.flops import parameter_counts
from lmtrain.terminal import counted


class _Size(NamedTuple):
    """How a model of some size learns from examples."""

    batch: int  # examples per update, of fewer than _MANY: small batches give enough updates
    passes: int  # over fewer than _MANY examples, at least
    updates: int  # that the passes are raised for
    most_passes: int  # more memorise the examples instead of learning from them


# A small model needs many updates, while one that knows the language has learned a few answers after four passes, and
# forgets other text and spoils its answers to new questions with more. Its adapters begin at zero, and take twice that.
_SMALL_MODEL, _LARGE_MODEL, _WITH_ADAPTERS = _Size(2, 3, 600, 12), _Size(4, 2, 100, 4), _Size(4, 2, 200, 8)
_PAIRS = _Size(2, 3, 300, 12)  # preferences, measured with a small model only
_SMALL = 20e6  # parameters of a model below which it is small
_MANY, _PASSES = 1_000, 3  # from so many examples: passes at least
_BATCHES = ((10_000, 16), (math.inf, 32))  # and (fewer examples than this, examples per update)
_FEW = 20  # updates below which the plan warns; 28 taught SmolLM2-135M thirty answers
_VALIDATIONS = 8
_FORWARD_TOKENS = 4096  # tokens of a forward pass: longer ones are not faster on a CPU, and fill a GPU well
_ROW_MULTIPLE = 64
_RATE_TIMES_ROOT = 2.0  # 1.7e-4 for 135 million parameters, 2.4e-5 for 7 billion
_MOST_RATES = ((100, 8e-4), (math.inf, 1.6e-3))  # (fewer examples than this, rate): few are soon learned by heart
_ADAPTERS, _MOST_ADAPTERS_RATE = 10, 2e-3


def settle(config: Config) -> None:
    """Sets what budget.updates plans, unless it was typed: rows per update, row length, epochs, rate, validations.

    budget.updates is a number of updates, or auto: by the size of the model and the number of examples.

    Raises:
        UserError: the rows are text, which has no examples.
    """
    asked = config.budget.updates
    if asked is None:
        return
    if config.data.rows == "text":
        raise UserError(f"budget.updates={asked} counts examples, and rows of text have none: set trainer.max_steps")
    typed = config.command.given
    config.budget.updates = None  # config.yaml holds what was chosen
    _fit_to_positions(config, typed)
    if "debug" in typed:
        return
    terminal.quiet_libraries()
    corpus = build_corpus(config)
    examples: Any = getattr(corpus.train, "examples", None)
    if examples is None:
        return  # rows of a user's own format, which are not packed
    packed = config.data.packing not in (None, "off")
    number = len(examples) if packed else len(corpus.train)  # a pair is a row of two answers
    tokens = int(examples.lengths.sum())
    parameters = count_parameters(config, corpus.tokenizer)
    adapters, are_pairs = config.peft.method != "none", config.objective.rows != "conversations"
    large = _WITH_ADAPTERS if adapters else _LARGE_MODEL
    learner = _PAIRS if are_pairs else _SMALL_MODEL if parameters < _SMALL else large
    size = next(size for below, size in ((_MANY, learner.batch), *_BATCHES) if number < below)
    passes = learner.passes if number < _MANY else _PASSES
    epochs = min(learner.most_passes, max(passes, math.ceil(learner.updates * size / number)))
    if asked != "auto":
        epochs = max(1, math.ceil(int(asked) * size / number))
    plan: dict[str, Any] = rows_of(config, size, tokens / number, int(examples.lengths.max()))
    plan |= {"trainer.max_epochs": epochs, "trainer.max_steps": None}
    if config.budget.chosen is not None or any(key in typed for key in LENGTHS):
        plan = {key: value for key, value in plan.items() if key not in LENGTHS}
    plan["trainer.val_check_interval"] = max(1, math.ceil(number * epochs / size / _VALIDATIONS))
    plan["trainer.val_before_training"] = True  # to see at the end whether the loss has fallen
    # Preferences and rewards need rates of their own, and so do other optimizers.
    if not are_pairs and config.optimizer.name in ("adamw", "adamw_8bit"):
        plan["optimizer.lr"] = learning_rate(parameters, number, adapters)
    for key, value in plan.items():
        if key not in typed:
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)


def _fit_to_positions(config: Config, typed: Mapping[str, Any]) -> None:
    """Shortens untyped rows to the positions of a model of the hub; those of a folder are known before (effect.py)."""
    model, data = config.model, config.data
    if not isinstance(model, LoadedModelConfig) or model.name_or_path is None or "data.seq_len" in typed:
        return
    file = optional_file(model.name_or_path, "config.json", revision=model.revision)
    most = positions_of(str(file.parent)) if file is not None else None
    if most is not None and most < data.seq_len:
        data.seq_len, data.max_length = most, min(most, data.max_length or most)


def rows_of(config: Config, size: int, mean: float, longest: int) -> dict[str, Any]:
    """Returns the rows per update, their length and the rows per forward pass that make updates of `size` examples.

    Args:
        mean, longest: the tokens of an example.
    """
    data, parts = config.data, devices.readers(config)
    length = data.seq_len
    if data.packing in (None, "off"):
        rows, length = -(-size // parts), longest
    else:  # a row per device holds its share of the update, unless longer rows are needed or allowed
        held = max(1, int(data.seq_len / mean))  # whole examples in the longest row
        rows = max(1, round(size / parts / held))
        if rows == 1:  # whole examples leave a rest of the row free
            needed = max(longest, (size / parts + 0.25) * mean)
            length = min(length, math.ceil(needed / _ROW_MULTIPLE) * _ROW_MULTIPLE)
    micro = nearest_divisor(rows, min(rows, max(1, _FORWARD_TOKENS // length)))
    plan = {"data.global_batch_size": rows * parts, "data.micro_batch_size": micro}
    return plan if data.packing in (None, "off") else {**plan, "data.seq_len": length}


def count_parameters(config: Config, tokenizer: Any) -> int:
    """Returns the number of parameters of the model that `config` trains, adapters included."""
    with torch.device("meta"):
        return parameter_counts(build_trainable_model(config, tokenizer))[0]


def learning_rate(parameters: int, examples: int, adapters: bool) -> float:
    """Returns the rate for fine-tuning so many parameters: inverse to their root, and ten times that for adapters.

    Wider layers need smaller updates of each weight (muP, Yang et al. 2022, arXiv:2203.03466), and so do deeper models
    (Yang et al. 2023, arXiv:2310.02244): the root of the parameters grows with the width and the root of the depth.
    The factor for adapters is that of "LoRA Without Regret" (Schulman et al. 2025). Two digits, to be read in the plan.
    """
    most = next(rate for below, rate in _MOST_RATES if examples < below)
    rate = min(_RATE_TIMES_ROOT / math.sqrt(parameters), most)
    if adapters:
        rate = min(_ADAPTERS * rate, _MOST_ADAPTERS_RATE)
    return float(f"{rate:.1e}")


def describe_examples(config: Config, corpus: Corpus) -> str:
    """Returns how many examples an update averages over, for the plan; '' for rows that hold none."""
    examples: Any = getattr(corpus.train, "examples", None)
    if config.data.rows == "text" or examples is None:
        return ""
    per_update = len(examples) / len(corpus.train) * step_sizes(config.data).last
    return f", about {per_update:.0f} of {len(examples):,} examples"


def advice(config: Config, steps: int) -> list[str]:
    """Returns the plan's note on a fine-tune of too few updates to learn from its examples."""
    t = config.trainer
    if config.data.rows == "text" or steps >= _FEW or t.fast_dev_run or t.overfit_batches:
        return []
    found = f"{counted(steps, 'update')} will hardly teach the model anything"
    return [f"{found}: budget.updates=auto plans by the number of examples, or raise trainer.max_epochs"]
