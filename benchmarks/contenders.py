"""The command and settings with which each contender trains the same shape on the same bins."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ends
import yaml
from legs import Leg, Lines, Skipped, Stamps
from litgpt_env import litgpt_python
from shapes import LEARNING_RATE

from lmtrain.config.schema import Config

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    """The task that all contenders get."""

    config: Config  # lmtrain's, composed from `overrides`
    overrides: list[str]
    bins: Path
    embedding_rows: int
    steps: int
    every: int  # steps between reports
    precision: str  # fp32 or bf16
    cuda: bool

    def write(self, path: Path) -> Path:
        """Writes the settings that our own leg scripts read, as JSON."""
        spec = {"overrides": self.overrides, "bins": str(self.bins), "steps": self.steps, "every": self.every}
        path.write_text(json.dumps(spec | {"precision": self.precision}))
        return path


def _printed_stamps(lines: Lines) -> Stamps:
    """Returns the reports of our own leg scripts, which print {"step": ..., "time": ...}."""
    rows = [json.loads(text) for _, text in lines if text.startswith('{"step"')]
    return [(row["step"], row["time"]) for row in rows]


def _printed_facts(lines: Lines) -> dict[str, Any]:
    return next(json.loads(text) for _, text in lines if text.startswith('{"parameters"'))


def bare(job: Job, folder: Path, options: Any) -> Leg:
    """A plain loop over lmtrain's model, loss and optimizer, with batches that are already in memory."""
    spec = job.write(folder / "spec.json")
    command = [sys.executable, str(HERE / "leg_bare.py"), str(spec)]
    return Leg(command, _printed_stamps, _printed_facts)


def lmtrain(job: Job, folder: Path, options: Any) -> Leg:
    """The lmtrain.train command, ended after its last timed step; its reports are the rows of metrics.jsonl."""

    def rows() -> list[dict[str, Any]]:
        found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [row for row in found if "step_ms" in row]

    return Leg(
        [sys.executable, "-m", "lmtrain.train", *job.overrides, *ends.words(job.steps), f"run.dir={folder / 'run'}"],
        stamps=lambda _: [(row["step"], row["time"]) for row in rows()],
        facts=lambda _: {"last_loss": rows()[-1]["train/loss"]},
    )


def transformers(job: Job, folder: Path, options: Any) -> Leg:
    """transformers' Trainer with transformers' model of the same shape."""
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise Skipped("transformers' Trainer needs accelerate: pip install accelerate -c constraints.txt") from None
    spec = job.write(folder / "spec.json")
    command = [sys.executable, str(HERE / "leg_transformers.py"), str(spec)]
    return Leg(command, _printed_stamps, _printed_facts, cwd=folder)


def litgpt(job: Job, folder: Path, options: Any) -> Leg:
    """`litgpt pretrain` in its own environment; it always compiles, which needs a C++ compiler on a CPU."""
    python = litgpt_python(options.litgpt_python)
    config = folder / "litgpt.yaml"
    config.write_text(yaml.safe_dump(_litgpt_config(job, folder)))
    command = [str(python), "-m", "litgpt", "pretrain", "shape", "--config", str(config)]
    env = {"PYTHONPATH": str(HERE)}
    if not job.cuda and not any(map(shutil.which, ("g++", "clang++", "cl"))):
        env["TORCH_COMPILE_DISABLE"] = "1"
    return Leg(command, _litgpt_stamps, _litgpt_facts, cwd=folder, env=env)


def _litgpt_stamps(lines: Lines) -> Stamps:
    found = [(t, re.search(r"\| iter \d+ step (\d+) \|", text)) for t, text in lines]
    return [(int(match[1]), t) for t, match in found if match]


def _litgpt_facts(lines: Lines) -> dict[str, Any]:
    found = (re.search(r"Total parameters: ([\d,]+)", text) for _, text in lines)
    return {"parameters": next(int(match[1].replace(",", "")) for match in found if match)}


def _litgpt_config(job: Job, folder: Path) -> dict[str, Any]:
    model, data = job.config.model, job.config.data
    shape: dict[str, Any] = {
        "name": "shape",
        "block_size": data.seq_len,
        "n_layer": model.num_hidden_layers,
        "n_head": model.num_attention_heads,
        "n_embd": model.hidden_size,
        "vocab_size": job.embedding_rows,
        "padded_vocab_size": job.embedding_rows,
        "norm_eps": model.norm_eps,
        "parallel_residual": False,
        "rotary_percentage": 1.0,
    }
    if model.family == "llama":
        shape |= {"norm_class_name": "RMSNorm", "bias": False, "mlp_class_name": "LLaMAMLP"}
        shape |= {"intermediate_size": model.intermediate_size, "n_query_groups": model.num_key_value_heads}
    else:  # its closest equivalent of GPT-2, with rotary instead of learned positions
        shape |= {"norm_class_name": "LayerNorm", "bias": True, "attn_bias": True, "mlp_class_name": "GptNeoxMLP"}
        shape |= {"gelu_approximate": "tanh"}
    lr, betas, decay = LEARNING_RATE, list(job.config.optimizer.betas or ()), job.config.optimizer.weight_decay
    return {
        "model_config": shape,
        "out_dir": str(folder / "out"),
        "precision": "bf16-mixed" if job.precision == "bf16" else "32-true",
        "data": {"class_path": "litgpt_bins.Bins", "init_args": {"folder": str(job.bins)}},
        "train": {
            "save_interval": None,
            "log_interval": job.every,
            "global_batch_size": data.global_batch_size,
            "micro_batch_size": data.micro_batch_size,
            "max_tokens": job.steps * data.global_batch_size * data.seq_len,
            "max_norm": job.config.trainer.gradient_clip_val,
            "lr_warmup_steps": 0,
            "min_lr": lr,
            "tie_embeddings": bool(model.tie_word_embeddings),
        },
        "eval": {"interval": 10**9, "max_iters": 1, "initial_validation": False, "final_validation": False},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": lr, "betas": betas, "weight_decay": decay},
        },
        "devices": 1,
        "logger_name": "csv",
        "seed": 1337,
    }


def nanogpt(job: Job, folder: Path, options: Any) -> Leg:
    """nanoGPT's unchanged train.py, from a folder of the user."""
    settings = _nanogpt_settings(job, folder, options, "train.py")
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in settings.items())]
    return Leg(command, nanogpt_stamps, cwd=options.nanogpt)


def nanogpt_model(job: Job, folder: Path, options: Any) -> Leg:
    """nanoGPT's model.py in our own loop, which does the same as its train.py, so only model.py is needed."""
    settings = _nanogpt_settings(job, folder, options, "model.py")
    spec = folder / "spec.json"
    spec.write_text(json.dumps(settings, default=str))
    command = [sys.executable, str(HERE / "leg_nanogpt.py"), str(spec)]
    return Leg(command, _printed_stamps, _printed_facts, cwd=options.nanogpt)


def _nanogpt_settings(job: Job, folder: Path, options: Any, file: str) -> dict[str, Any]:
    """Returns the settings by the names of its train.py; raises Skipped if it can't run this job."""
    if options.nanogpt is None:
        raise Skipped(f"name a folder with nanoGPT's {file}: --nanogpt DIR")
    if not (options.nanogpt / file).is_file():
        raise Skipped(f"{options.nanogpt} holds no {file}")
    model, data, adamw = job.config.model, job.config.data, job.config.optimizer
    if model.family != "gpt2":
        raise Skipped(f"it has no {model.family}")
    if job.precision == "bf16" and not job.cuda:
        raise Skipped("it has no bf16 on a CPU")
    beta1, beta2 = adamw.betas or (0.9, 0.95)
    return {
        "dataset": job.bins,  # an absolute path, which overrides its data/ folder
        "out_dir": folder / "out",
        "device": "cuda" if job.cuda else "cpu",
        "dtype": "bfloat16" if job.precision == "bf16" else "float32",
        "compile": job.cuda,  # off on a CPU, as in its README
        "eval_interval": 10**9,
        "eval_iters": 1,
        "always_save_checkpoint": False,
        "log_interval": job.every,
        "block_size": data.seq_len,
        "batch_size": data.micro_batch_size,
        "gradient_accumulation_steps": data.global_batch_size // data.micro_batch_size,
        "n_layer": model.num_hidden_layers,
        "n_head": model.num_attention_heads,
        "n_embd": model.hidden_size,
        "bias": True,  # as in GPT-2
        "dropout": 0.0,
        "max_iters": job.steps,
        "learning_rate": LEARNING_RATE,
        "decay_lr": False,
        "weight_decay": adamw.weight_decay,
        "beta1": beta1,
        "beta2": beta2,
        "grad_clip": job.config.trainer.gradient_clip_val,
    }


def nanogpt_stamps(lines: Lines) -> Stamps:
    """It prints the line of iter n after n + 1 steps."""
    found = [(t, re.match(r"iter (\d+): loss", text)) for t, text in lines]
    return [(int(match[1]) + 1, t) for t, match in found if match]


CONTENDERS: dict[str, Callable[[Job, Path, Any], Leg]] = {
    "bare": bare,
    "lmtrain": lmtrain,
    "transformers": transformers,
    "litgpt": litgpt,
    "nanogpt": nanogpt,
    "nanogpt_model": nanogpt_model,
}
