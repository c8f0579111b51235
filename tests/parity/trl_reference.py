"""TRL's results for given rows: run in TRL's environment (`make env-trl`), never imported by lmtrain's tests.

python trl_reference.py spec.json out.json

The spec names the result: `labels` (SFTTrainer's token ids and labels), `templates` (a chat template of TRL's), `sft`
(its losses and gradient norms) or `dpo` (DPOTrainer's metrics; `kto`, `grpo`, `gkd`, `reward` are like it). Rows are
taken in the order given.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

Spec = dict[str, Any]


def labels(spec: Spec) -> dict[str, Any]:
    """Returns input ids and labels (-100: not learned) of every row, as SFTTrainer prepares them."""
    tokenizer = read_tokenizer(spec)
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), **tiny)  # SFTTrainer requires a model
    only = spec.get("assistant_only_loss", True)
    args = trl.SFTConfig(assistant_only_loss=only, max_length=spec["max_length"], **common())
    # A row is a conversation, or {prompt, completion}.
    rows = Dataset.from_list([{"messages": row} if isinstance(row, list) else row for row in spec["rows"]])
    trainer = trl.SFTTrainer(LlamaForCausalLM(config), args, train_dataset=rows, processing_class=tokenizer)
    return {name: list(trainer.train_dataset[name]) for name in ("input_ids", "labels")}


def templates(spec: Spec) -> dict[str, str]:
    """Returns a template of TRL's collection as models ship it, and as TRL marks it for assistant_only_loss."""
    folder = Path(trl.__file__).parent / "chat_templates"
    plain = folder / spec["trl_template"]
    return {"plain": plain.read_text(), "marked": plain.with_stem(f"{plain.stem}_training").read_text()}


def sft(spec: Spec) -> list[dict[str, float]]:
    """Returns loss and gradient norm (before clipping) of each step, starting from the given adapter."""
    rows = Dataset.from_list([{"messages": messages} for messages in spec["rows"]])
    args = trl.SFTConfig(assistant_only_loss=True, max_length=spec["max_length"], **common(), **optimisation(spec))
    model = PeftModel.from_pretrained(read_model(spec), spec["adapter"], is_trainable=True)
    trainer = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=read_tokenizer(spec))
    trainer.train()
    return steps_of(trainer)


def dpo(spec: Spec) -> dict[str, list[dict[str, float]]]:
    """Returns DPOTrainer's metrics of each step, for each of spec["losses"]: {name: keywords of DPOConfig}."""
    found = {}
    for name, keywords in spec["losses"].items():
        args = trl.DPOConfig(max_length=spec["max_length"], **common(), **optimisation(spec), **keywords)
        model, reference = policy_and_reference(spec)
        rows = Dataset.from_list(spec["rows"])
        trainer = trl.DPOTrainer(model, reference, args=args, train_dataset=rows, processing_class=read_tokenizer(spec))
        trainer.train()
        found[name] = steps_of(trainer)
    return found


def kto(spec: Spec) -> list[dict[str, float]]:
    """Returns KTOTrainer's metrics of each step."""
    args = trl.KTOConfig(max_length=spec["max_length"], **common(), **optimisation(spec), **spec["keywords"])
    model, reference = policy_and_reference(spec)
    rows = Dataset.from_list(spec["rows"])
    trainer = trl.KTOTrainer(model, reference, args=args, train_dataset=rows, processing_class=read_tokenizer(spec))
    trainer.train()
    return steps_of(trainer)


def reward(spec: Spec) -> list[dict[str, float]]:
    """Returns RewardTrainer's metrics of each step, and of held-out rows if given; the model has a scalar head."""
    args = trl.RewardConfig(max_length=spec["max_length"], **common(), **optimisation(spec), **spec["keywords"])
    model = AutoModelForSequenceClassification.from_pretrained(spec["model"], num_labels=1, dtype=torch.float32)
    rows, held_out = Dataset.from_list(spec["rows"]), spec.get("held_out")
    trainer = trl.RewardTrainer(model, args, train_dataset=rows, processing_class=read_tokenizer(spec),
                                eval_dataset=Dataset.from_list(held_out) if held_out else None)  # fmt: skip
    trainer.train()
    return [*steps_of(trainer), *([trainer.evaluate()] if held_out else [])]


def gkd(spec: Spec) -> list[dict[str, float]]:
    """Returns GKDTrainer's loss and gradient norm of each step, on the data alone."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    args = GKDConfig(max_length=spec["max_length"], lmbda=0.0, **common(), **optimisation(spec), **spec["keywords"])
    teacher = AutoModelForCausalLM.from_pretrained(spec["teacher"], dtype=torch.float32)
    rows = Dataset.from_list(spec["rows"])
    trainer = GKDTrainer(
        read_model(spec), teacher, args=args, train_dataset=rows, processing_class=read_tokenizer(spec)
    )
    trainer.train()
    return steps_of(trainer)


def grpo(spec: Spec) -> list[dict[str, float]]:
    """Returns each step's loss (before it is logged), gradient norm and clipped share, by GRPOTrainer or RLOOTrainer.

    They take the completions of spec["completions"] instead of sampling.
    """
    known = json.loads(Path(spec["completions"]).read_text())
    module = sys.modules[trl.GRPOTrainer.__module__ if spec["trainer"] == "grpo" else trl.RLOOTrainer.__module__]
    module.shuffle_sequence_dict = lambda batch: batch  # it would spread a group over the steps of a rollout
    base, config = (trl.GRPOTrainer, trl.GRPOConfig) if spec["trainer"] == "grpo" else (trl.RLOOTrainer, trl.RLOOConfig)

    class Fixed(base):  # type: ignore[misc, valid-type]
        losses: list[float] = []  # noqa: RUF012

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            seen: dict[str, int] = {}
            found = []
            for ids in prompt_ids:
                prompt = " ".join(map(str, ids))
                found.append(known[prompt][seen.get(prompt, 0)])
                seen[prompt] = seen.get(prompt, 0) + 1
            return (found, None) if spec["trainer"] == "grpo" else found

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            self.losses.append(loss.item())
            return loss

    def reward(completion_ids: Any, **_: Any) -> list[float]:
        return [(sum(ids) % 11) / 4 for ids in completion_ids]

    own = {**common(), **optimisation(spec)}
    own.pop("train_sampling_strategy")
    args = config(
        **own,
        num_generations=spec["group"],
        max_completion_length=spec["most"],
        steps_per_generation=spec["accumulation"] * spec["updates"],
        shuffle_dataset=False,
        **spec["keywords"],
    )
    model, rows = read_model(spec), Dataset.from_list(spec["rows"])
    trainer = Fixed(model, reward, args=args, train_dataset=rows, processing_class=read_tokenizer(spec))
    trainer.train()
    n = spec["accumulation"]
    share = 1 if spec["trainer"] == "grpo" else n  # GRPOTrainer's loss is divided by the accumulation already
    summed = [sum(Fixed.losses[i : i + n]) / share for i in range(0, len(Fixed.losses), n)]
    steps = steps_of(trainer)
    return [
        {"loss": loss, "grad_norm": row["grad_norm"], "clipped": row["clip_ratio/region_mean"]}
        for loss, row in zip(summed, steps, strict=True)
    ]


def policy_and_reference(
    spec: Spec,
) -> tuple[Any, transformers.PreTrainedModel | None]:
    """Returns the policy and, without an adapter, a copy as reference; with one, None, as TRL copies the adapter."""
    model = read_model(spec)
    if spec["adapter"]:
        return PeftModel.from_pretrained(model, spec["adapter"], is_trainable=True), None
    return model, read_model(spec)


def read_tokenizer(spec: Spec) -> transformers.PreTrainedTokenizerBase:
    """Returns the tokenizer with the template of TRL's collection that the spec names, or with one given as text."""
    tokenizer = AutoTokenizer.from_pretrained(spec["tokenizer"])
    if spec.get("trl_template"):
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / spec["trl_template"]).read_text()
    elif spec.get("template"):
        tokenizer.chat_template = spec["template"]
    return tokenizer


def read_model(spec: Spec) -> transformers.PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)


def common() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl_"),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def optimisation(spec: Spec) -> dict[str, Any]:
    """Returns settings for AdamW with a constant rate, with every step logged."""
    return {
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": spec["micro_batch_size"],
        "gradient_accumulation_steps": spec["accumulation"],
        "num_train_epochs": 1,
        "optim": "adamw_torch",
        "learning_rate": spec["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": spec["betas"][0],
        "adam_beta2": spec["betas"][1],
        "weight_decay": 0.0,
        "max_grad_norm": spec["clip"],
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
    }


def steps_of(trainer: transformers.Trainer) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "grad_norm" in row]


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    asked = json.loads(Path(sys.argv[1]).read_text())
    answer = {
        "labels": labels,
        "templates": templates,
        "sft": sft,
        "dpo": dpo,
        "kto": kto,
        "grpo": grpo,
        "gkd": gkd,
        "reward": reward,
    }[asked["what"]](asked)
    Path(sys.argv[2]).write_text(json.dumps(answer))
