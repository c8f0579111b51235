"""Runs of the grid's cells with lmtrain, and the plain loops they must equal."""

import contextlib
import copy
import functools
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import bitsandbytes
import torch
from grid import ADAPTERS, PATHS, Cell
from peft import LoraConfig, PeftModel, get_peft_model
from plain import (
    BETA,
    BETAS,
    CLIP,
    DECAY,
    EOS,
    EPS,
    LR,
    Draws,
    Loss,
    Plain,
    Trained,
    attention_of,
    dpo,
    encoded,
    frozen,
    kto,
    language_model,
    mdlm,
    to_precision,
    train,
)
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lmtrain.config.compose import check, compose
from lmtrain.config.schema import Config
from lmtrain.distributed import devices
from lmtrain.losses import cross_entropy
from lmtrain.models import blocks
from lmtrain.objectives import kto as their_kto
from lmtrain.objectives import mdlm as their_mdlm
from lmtrain.run.session import Session
from lmtrain.run_folder import folder as run_dir
from support import rows
from tiny_pretrained import save_pretrained

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito", "Bern", "Baku", "Doha", "Riga", "Kyiv", "Bonn", "Male"]
SEQ_LEN, MASK = 64, EOS + 1  # the mask token is the embeddings' spare row
# The chat template for single answers: the turns' texts, with an end-of-text token after each answer.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
# Rows per step, which are all training rows that a run prepares; checked by `run_config`.
ROWS = {"plain": 2, "packed": 6, "padded": 12, "unpadded": 12, "unshared": 12}


def sentence(i: int) -> str:
    return f"{CITIES[i]} is {7 * i % 90} {'far' if i % 2 else 'near, I think'}."


def write_data(folder: Path) -> None:
    """Writes the raw rows of every kind of data, a model, a trained adapter, and a chat template."""
    texts = [sentence(i) for i in range(12)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": f"{t} Is it?"}) + "\n" for t in texts))
    (folder / "windows.txt").write_text(("".join(texts) * 2)[: 2 * SEQ_LEN])  # 2 windows, with the end-of-text token
    kinds = {
        "sft": [{"prompt": f"{CITIES[i]}? ", "completion": sentence(i)} for i in range(12)],
        "dpo": [
            {"prompt": f"{CITIES[i]}? ", "chosen": sentence(i), "rejected": CITIES[-i] * (1 + i % 3)} for i in range(12)
        ],
        "kto": [{"prompt": f"{CITIES[i]}?", "completion": sentence(i), "label": i % 3 != 0} for i in range(12)],
    }
    for name, found in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (folder / "template.jinja").write_text(TEMPLATE)
    save_pretrained(folder / "model", spare_rows=1, intermediate_size=64, initializer_range=0.06)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), config)
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:  # as small as after a short training: larger ones amplify rounding in gradients
            parameter.data *= 0.1
    adapter.save_pretrained(folder / "adapter")


def data_of(cell: Cell, folder: Path) -> list[str]:
    plain = cell.path == "plain"
    if cell.objective in ("causal_lm", "mdlm"):
        file = "windows.txt" if plain else "documents.jsonl"
        kind = "data=text" if plain else "data=jsonl"
        return [kind, f"data.path={folder / file}"]
    kind = {"sft": "chat_jsonl", "dpo": "preference_jsonl", "kto": "unpaired_jsonl"}[cell.objective]
    own = {
        "sft": ["data.conversation_format=prompt_completion"],
        "dpo": ["data.conversation_format=preference_text"],
        "kto": [f"data.chat_template={folder / 'template.jinja'}"],
    }[cell.objective]
    return [f"data={kind}", f"data.path={folder / cell.objective}.jsonl", *own]


class How(NamedTuple):
    """How cells are run."""

    backend: str  # torch.compile's backend
    steps: int


def overrides(cell: Cell, folder: Path, run: Path, steps: int) -> list[str]:
    """Returns the command line of a cell."""
    size = ROWS[cell.path]
    micro = {"whole": size // cell.ranks, "split": 1 if size == 2 else size // 2 // cell.ranks}[cell.split]
    objective = [f"objective={cell.objective}"]
    if cell.reference != "-":
        objective += [f"objective.reference={cell.reference}", f"objective.beta={BETA}"]
    if cell.objective == "mdlm":
        objective += ["export.enabled=false"]
    adapter = [*ADAPTERS[cell.adapter]]
    if "lora" in cell.adapter or cell.adapter in ("pissa", "dora", "continued"):
        adapter += ["peft.r=4", "peft.alpha=8"]
    if cell.adapter == "continued":
        adapter += [f"peft.adapter={folder / 'adapter'}"]
    if "memory" in cell.adapter:
        adapter += ["memory.num_chapters=4", "memory.chapter_size=4", "memory.memory_dim=8", "memory.num_heads=2"]
        adapter += ["memory.top_k=2", "memory.layers=[1]", "router.load_balance=0", "router.z_loss=0"]
    return [
        *objective, *data_of(cell, folder), *PATHS[cell.path], *adapter,
        "model=pretrained", f"model.name_or_path={folder / 'model'}", "model.dropout=0.0",
        f"data.seq_len={SEQ_LEN}", "data.val_fraction=0", f"data.global_batch_size={size}",
        f"data.micro_batch_size={micro}", f"trainer.precision={cell.precision}",
        f"trainer.compile={str(cell.compile == 'compiled').lower()}", f"trainer.devices={cell.ranks}",
        "trainer.accelerator=cpu", f"trainer.max_steps={steps}", f"trainer.gradient_clip_val={CLIP}",
        "trainer.log_every_n_steps=1", "trainer.num_threads=1", "schedule=constant", f"optimizer.lr={LR}",
        f"optimizer.betas={list(BETAS)}", f"optimizer.eps={EPS}", f"optimizer.weight_decay={DECAY}",
        "callbacks.samples.every_n_validations=0", "export.enabled=false", "report.enabled=false",
        "logger=none", f"run.dir={run}",
    ]  # fmt: skip


@dataclass
class Ran(Trained):
    """The results of a run, and what its plain loop needs from it."""

    names: set[str] = field(default_factory=set)  # names of all numbers in metrics.jsonl
    start: nn.Module | None = None  # the untrained model, if it has a memory
    first: dict[str, torch.Tensor] = field(default_factory=dict)  # an adapter's random initial weights
    draws: Draws = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Yields a list that collects what is drawn for each training micro-batch.

    Masked diffusion: (ids, hidden, times). Single answers: token ids of each, with its own and its mismatched prompt.
    """
    drawn: list[Any] = []
    loss_of, look_ahead = their_mdlm.MDLM.masked_log_probs, their_kto.KTO.look_ahead

    def noting(self: Any, ids: Any, masked: Any) -> Any:
        drawn.append((ids, masked.where, masked.times))
        return loss_of(self, ids, masked)

    def looking(self: Any, micro_batches: Any, n_tokens: Any) -> None:
        for batch in micro_batches:
            both = [
                batch[f"{kind}input_ids"][0].split(batch[f"{kind}cu_seqlens"].diff().tolist()) for kind in ("", "kl_")
            ]
            drawn.append([(own.tolist(), other.tolist()) for own, other in zip(*both, strict=True)])
        look_ahead(self, micro_batches, n_tokens)

    with (
        mock.patch.object(their_mdlm.MDLM, "masked_log_probs", noting),
        mock.patch.object(their_kto.KTO, "look_ahead", looking),
    ):
        yield drawn


def config_of(cell: Cell, folder: Path, run: Path, steps: int) -> Config:
    config = check(compose(overrides(cell, folder, run, steps)))
    devices.resolve_auto(config)
    return config


def session_of(config: Config) -> Session:
    first = os.environ.get("RANK", "0") == "0"
    return Session(config, run_dir.open_run(config) if first else run_dir.RunDir(Path(str(config.run.dir))))


def run_cell(cell: Cell, folder: Path, run: Path, how: How) -> Ran:
    """Trains a cell in this process."""
    return run_config(cell, config_of(cell, folder, run, how.steps), how)


def run_config(cell: Cell, config: Config, how: How) -> Ran:
    """Trains a cell in this process, or this rank's part of a cell of two ranks."""
    compile_model, block = blocks.compile_model, torch.compile(cross_entropy._block, backend=how.backend)
    found = Ran()
    with contextlib.ExitStack() as stack:
        for name, ours in {
            "lmtrain.run.build.compile_model": functools.partial(compile_model, backend=how.backend),
            "lmtrain.losses.cross_entropy._compile_block": lambda: block,
        }.items():
            stack.enter_context(mock.patch(name, ours))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        session = session_of(config)
        built = session.build(stack)
        assert len(built.corpus.train) == ROWS[cell.path], (cell.id, len(built.corpus.train))
        model: Any = built.objective.model.model
        found.start = copy.deepcopy(model) if "memory" in cell.adapter and cell.ranks == 1 else None
        found.first = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
        drawn = stack.enter_context(recorded())
        assert session.train(built) == 0
    for row in rows(Path(str(config.run.dir)) / "metrics.jsonl"):
        found.losses.append(row["train/loss"])
        found.norms.append(row["grad_norm"])
        found.names |= set(row)
    found.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    each = len(drawn) // how.steps
    found.draws = [drawn[s * each : (s + 1) * each] for s in range(how.steps)]
    return found


def start_of(cell: Cell, folder: Path, run: Path) -> nn.Module:
    """Returns the untrained model of a cell."""
    with contextlib.ExitStack() as stack:
        model: nn.Module = session_of(config_of(cell, folder, run, 1)).build(stack).objective.model.model
        return model


def run_on_ranks(cells: list[Cell], folder: Path, runs: Path, how: How) -> list[Ran]:
    """Trains two-rank cells one after the other, in two processes forked from this one, which has all imports."""
    context = multiprocessing.get_context("fork")
    configs = [config_of(cell, folder, runs / f"run_{number}", how.steps) for number, cell in enumerate(cells)]
    processes = [context.Process(target=_rank, args=(rank, cells, configs, runs, how)) for rank in range(2)]
    for process in processes:
        process.start()
    running, deadline = list(processes), time.monotonic() + 300
    while running and all(p.exitcode in (None, 0) for p in processes):  # if one has failed, the other waits for it
        if not multiprocessing.connection.wait([p.sentinel for p in running], timeout=deadline - time.monotonic()):
            break
        running = [p for p in running if p.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    found = []
    for number, cell in enumerate(cells):
        parts = [runs / f"{rank}_{number}.pt" for rank in range(2)]
        loaded = [torch.load(part, weights_only=False) if part.exists() else "no result" for part in parts]
        assert all(isinstance(part, Ran) for part in loaded), "\n".join(map(str, [cell.id, *loaded]))
        first, second = loaded
        for name, weight in first.weights.items():
            assert torch.equal(weight, second.weights[name]), f"the ranks' {name} differ"
        if "memory" in cell.adapter:
            first.start = start_of(cell._replace(ranks=1), folder, runs / f"start_{number}")
        first.draws = [a + b for a, b in zip(first.draws, second.draws, strict=True)]
        found.append(first)
    return found


def _rank(rank: int, cells: list[Cell], configs: list[Config], runs: Path, how: How) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"LMTRAIN_MEETING": str(runs), "GROUP_RANK": "0"}
    torch.set_num_threads(1)
    for number, (cell, config) in enumerate(zip(cells, configs, strict=True)):
        torch._dynamo.reset()
        try:
            found = run_config(cell, config, how)
        except BaseException:  # the other rank would wait for this one
            torch.save(traceback.format_exc(), runs / f"{rank}_{number}.pt")
            os._exit(1)
        torch.save(found, runs / f"{rank}_{number}.pt")
    os._exit(0)


# What the plain loops read from the raw rows.


def loss_of(cell: Cell, folder: Path, draws: Draws) -> Loss:
    if cell.objective == "mdlm":
        text = [*encoded((folder / "windows.txt").read_text()), EOS]
        windows = sorted(text[i * SEQ_LEN : (i + 1) * SEQ_LEN] for i in range(2))
        for step in draws:
            assert sorted(row for ids, _, _ in step for row in ids.tolist()) == windows
        return mdlm(draws, MASK)
    if cell.path == "plain":
        text = [*encoded((folder / "windows.txt").read_text()), EOS]
        parts = [text[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(2)]
        return language_model([(part, [True] * len(part)) for part in parts])
    if cell.objective == "causal_lm":
        texts = [[*encoded(row["text"]), EOS] for row in rows(folder / "documents.jsonl")]
        return language_model([(ids, [True] * len(ids)) for ids in texts])
    found = rows(folder / f"{cell.objective}.jsonl")
    prompts = [encoded(row["prompt"]) for row in found]
    ended = lambda text: [*encoded(text), EOS]  # noqa: E731
    if cell.objective == "sft":
        answers = [ended(row["completion"]) for row in found]
        marks = [[False] * len(p) + [True] * len(a) for p, a in zip(prompts, answers, strict=True)]
        return language_model([(p + a, m) for p, a, m in zip(prompts, answers, marks, strict=True)])
    if cell.objective == "dpo":
        pairs = zip(prompts, found, strict=True)
        return dpo([(p, ended(row["chosen"]), ended(row["rejected"])) for p, row in pairs])
    answers = [ended(row["completion"]) for row in found]
    whole = [p + a for p, a in zip(prompts, answers, strict=True)]

    def numbered(own: list[int], other: list[int]) -> tuple[int, int]:
        row = whole.index(own)
        assert other[: len(prompts[row])] == prompts[row]
        return row, answers.index(other[len(prompts[row]) :])

    pairs = [[numbered(*both) for micro_batch in step for both in micro_batch] for step in draws]
    return kto([(p, a, row["label"]) for p, a, row in zip(prompts, answers, found, strict=True)], pairs)


def base_of(cell: Cell, folder: Path) -> nn.Module:
    int8 = BitsAndBytesConfig(load_in_8bit=True) if cell.adapter == "qlora_8bit" else None
    options: dict[str, Any] = {"quantization_config": int8, "device_map": "cpu"} if int8 else {}
    attention = attention_of(cell.objective, cell.precision)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation=attention, **options)
    if cell.adapter == "qlora":
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and name != "lm_head":  # the output layer isn't quantized
                    module.weight.copy_(as_nf4(module.weight))
    return model


def as_nf4(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight after quantization to 4 bits with quantized scales (Dettmers et al. 2023)."""
    packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return bitsandbytes.functional.dequantize_4bit(packed, state)


def plain_of(cell: Cell, folder: Path, ran: Ran) -> Plain:
    """Builds the model that the run started from with transformers and peft, and an untrained copy as its reference."""
    if "memory" in cell.adapter:  # lmtrain's own architecture, which tests/adapters/test_memory.py tests
        model: Any = ran.start
        model.set_attn_implementation(attention_of(cell.objective, cell.precision))
        to_precision(model, cell.precision)
        return Plain(model, frozen(model) if cell.reference not in ("-", "none") else None, cell.precision, True)
    model = base_of(cell, folder)
    if cell.adapter == "continued":
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    elif cell.adapter != "none":
        init: Any = "pissa" if cell.adapter == "pissa" else True
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=init,
            use_dora=cell.adapter == "dora",
        )  # fmt: skip
        model = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # random ones are copied from the run
                if "lora_" in name:
                    parameter.copy_(ran.first[name.removeprefix("base_model.model.")])
    to_precision(model, cell.precision)
    reference = frozen(model) if cell.reference not in ("-", "none") else None
    return Plain(model, reference, cell.precision, cell.adapter != "none")


def expected(cell: Cell, folder: Path, ran: Ran) -> Trained:
    found = train(plain_of(cell, folder, ran), loss_of(cell, folder, ran.draws), len(ran.losses))
    found.weights = {name.removeprefix("base_model.model."): w for name, w in found.weights.items()}
    return found
