"""One step in several variants, in turns of a few steps (A B A B): milliseconds of each turn, and where they go.

Each variant is a process with its own model and optimizer; all compile at the same time, then one at a time trains.
All see the same batches, so the losses tell whether a variant learns the same. Run by gpu_queue.py:
    python leg_switches.py spec.json
SPEC: {"overrides": [...], "variants": {name: {...}}, "turns": N, "steps": timed in a turn, "embedding_rows": of
nanoGPT's model}. A variant may have "overrides", "inductor" (values of torch._inductor.config), "one_region" (the
decoder, instead of each block), "bf16_stream" (the residual stream in bf16), "loss_kernel" (block size and warps of
loss_kernel.py), "fp8_head" (what fp8_head.py switches on), "attention" (names of the kernels that
F.scaled_dot_product_attention may choose), or "nanogpt" (the folder of its model.py, which trains instead).
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import kernels
import torch
import torch._inductor.config
from leg_bare import read_steps
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmtrain.config import compose as config
from lmtrain.data.corpus import build_corpus
from lmtrain.data.text.windows import IGNORE
from lmtrain.distributed import devices
from lmtrain.losses import cross_entropy
from lmtrain.models.blocks import compile_model, decoder_blocks
from lmtrain.run import build

WARMUP = 30  # steps of the learning rate
UNTIMED = 2  # steps at the beginning of a turn
AT_ONCE = 4  # variants that compile at the same time: each holds up to 40 GB of the device then, and several CPU cores
ANSWER = "@answer "  # begins the lines of a variant that its coordinator reads


class Variant:
    """A model and an optimizer, and how they are compiled."""

    def __init__(self, spec: dict[str, Any], own: dict[str, Any]) -> None:
        cfg = config.check(config.compose([*spec["overrides"], *own.get("overrides", [])]))
        devices.resolve_auto(cfg)
        self.compiled = bool(cfg.trainer.compile)
        cfg.trainer.compile = False  # compiled below
        self.config, corpus = cfg, build_corpus(cfg)
        steps = (spec["steps"] + UNTIMED) * (spec["turns"] + 1) + kernels.STEPS + UNTIMED
        self.batches = read_steps(cfg, corpus, steps)
        self.kernels = [getattr(SDPBackend, name) for name in own.get("attention", [])]
        self.done, self.stepped, self.losses, self.loss = 0, 0, [], torch.zeros(())
        if "nanogpt" in own:
            self._nanogpt(own["nanogpt"], spec["embedding_rows"])
        else:
            objective = build.build_objective(cfg, corpus, steps).to(cfg.trainer.accelerator)
            self.model, self.optimizer = objective.model, objective.configure_optimizers()
            self.loss_sum = lambda batch: self.model(**batch).loss_sum
            self._compile(own)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def _compile(self, own: dict[str, Any]) -> None:
        model = self.model.model
        if own.get("bf16_stream"):
            decoder_blocks(model)[0].register_forward_pre_hook(_to_bf16, with_kwargs=True)
        if "loss_kernel" in own:
            import loss_kernel

            size, warps = own["loss_kernel"]
            cross_entropy._compiled_block = partial(loss_kernel.block, size=size, warps=warps)
        if "fp8_head" in own:
            import fp8_head

            fp8_head.switch_on(own["fp8_head"])
        if not self.compiled:
            return

        for key, value in own.get("inductor", {}).items():
            setattr(torch._inductor.config, key, value)
        if own.get("one_region"):
            model.base_model.compile(backend=_inductor)
            self.model._compiled = lambda: True  # the loss too
        else:
            compile_model(model, backend=_inductor)  # type: ignore[arg-type]

    def _nanogpt(self, folder: str, vocab_size: int) -> None:
        sys.path.insert(0, folder)
        from model import GPT, GPTConfig  # nanoGPT's

        model, adamw = self.config.model, self.config.optimizer
        shape = {"n_layer": model.num_hidden_layers, "n_head": model.num_attention_heads, "n_embd": model.hidden_size}
        length = self.config.data.seq_len
        made = GPT(GPTConfig(vocab_size=vocab_size, block_size=length, bias=True, dropout=0.0, **shape))
        device = self.config.trainer.accelerator
        self.model = made.to(device)
        torch.set_float32_matmul_precision("high")  # as its train.py does
        self.optimizer = made.configure_optimizers(adamw.weight_decay, adamw.lr, (0.9, 0.95), device)
        forward = torch.compile(made) if self.compiled else made
        self.loss_sum = lambda b: forward(b["input_ids"], b["labels"])[1] * b["labels"].numel()

    def turn(self, steps: int) -> float:
        """Trains on the next batches; returns milliseconds a step, without the first, which allocate memory."""
        with sdpa_kernel(self.kernels) if self.kernels else contextlib.nullcontext():
            self._steps(UNTIMED)
            began = time.perf_counter()
            self._steps(steps)
        took = 1000 * (time.perf_counter() - began) / steps
        self.losses.append(round(float(self.loss), 5))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next variant's
        return took

    def _steps(self, steps: int) -> None:
        for micro_batches in self.batches[self.done : self.done + steps]:
            self._step(micro_batches, self.config.trainer.accelerator)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.done += steps

    def _step(self, micro_batches: list[dict[str, torch.Tensor]], device: str) -> None:
        self.stepped += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * min(1.0, self.stepped / WARMUP)
        n_tokens = sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
        mixed = self.config.trainer.precision == "bf16-mixed"
        with torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext():
            for batch in micro_batches:
                loss_sum = self.loss_sum({k: v.to(device, non_blocking=True) for k, v in batch.items()})
                (loss_sum / n_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.gradient_clip_val)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss_sum.detach() / n_tokens

    def curve(self, steps: int) -> list[float]:
        """Trains; returns the loss of each step."""
        losses = []
        for _ in range(steps):
            self._steps(1)
            losses.append(float(self.loss))
        return losses

    def profile(self) -> dict[str, Any]:
        """Trains a few steps in the profiler; returns the table of kernels."""
        self._steps(UNTIMED)
        with torch.profiler.profile(activities=kernels.ACTIVITIES) as profile:
            began = time.perf_counter()
            self._steps(kernels.STEPS)
            step_ms = 1000 * (time.perf_counter() - began) / kernels.STEPS
        return kernels.table(profile.key_averages(), step_ms)


def _to_bf16(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of the first block."""
    dtype = torch.bfloat16 if torch.is_autocast_enabled(args[0].device.type) else args[0].dtype
    return (args[0].to(dtype), *args[1:]), options


def _inductor(graph: Any, inputs: Any) -> Any:
    if not torch.cuda.is_available():
        return graph  # without inductor, whose C++ takes long to compile
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


def serve(spec: dict[str, Any], name: str) -> None:
    """Trains as the lines of stdin say, and answers each: "turn" with milliseconds, "profile" with a table."""
    variant = Variant(spec, spec["variants"][name])
    first = None
    with contextlib.suppress(torch.OutOfMemoryError):  # too many at the same time: again when it is this one's turn
        first = variant.turn(spec["steps"])  # compiles
    if first is None:
        variant.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    print(ANSWER + json.dumps(first), flush=True)
    for line in sys.stdin:
        answer = variant.turn(spec["steps"]) if line.strip() == "turn" else variant.profile()
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        found = {"answer": answer, "losses": variant.losses, "peak_gib": round(peak, 1)}
        print(ANSWER + json.dumps(found), flush=True)


class Process:
    """A variant in a process of its own."""

    def __init__(self, spec: str, name: str, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen([sys.executable, __file__, spec, name], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=errors, text=True,
                                            env={"TORCHINDUCTOR_COMPILE_THREADS": "3", **os.environ})  # fmt: skip

    def answer(self) -> Any:
        """Returns the next answer; raises RuntimeError with the end of its errors if there is none."""
        for line in self.process.stdout or ():
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(self.log.read_text()[-500:])

    def ask(self, word: str) -> Any:
        print(word, file=self.process.stdin, flush=True)
        return self.answer()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) > 2:
        serve(spec, sys.argv[2])
        return
    Turns(spec, Path(sys.argv[1])).run()


class Turns:
    """The variants' processes, and what they have answered."""

    def __init__(self, spec: dict[str, Any], path: Path) -> None:
        self.spec, self.path = spec, path
        self.running: dict[str, Process] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}

    def run(self) -> None:
        waiting = list(self.spec["variants"])
        for name in waiting[:AT_ONCE]:
            self._start(name)
        for number, name in enumerate(waiting):
            self._each([name], self._first)
            for following in waiting[number + AT_ONCE : number + AT_ONCE + 1]:
                self._start(following)
        for number in range(self.spec["turns"]):
            self._each(waiting, self._turn)
            if number == 0:
                self._each(waiting, self._profile)
        for process in self.running.values():
            process.process.kill()

    def _start(self, name: str) -> None:
        self.running[name] = Process(str(self.path), name, self.path.with_name(f"{name}.txt"))
        self.found[name] = {"rounds": []}

    def _each(self, names: list[str], do: Callable[[str, Process], None]) -> None:
        for name in [n for n in names if n not in self.failed]:
            try:
                do(name, self.running[name])
            except (RuntimeError, OSError) as error:  # one that can't run here must not stop the others
                self.failed[name] = str(error)[-500:]
            print(json.dumps(self.numbers()), flush=True)  # the last such line counts, however soon this is ended

    def _first(self, name: str, process: Process) -> None:
        if process.answer() is None:
            process.ask("turn")
            self.found[name]["ran_out_of_memory_at_first"] = True

    def _turn(self, name: str, process: Process) -> None:
        said = process.ask("turn")
        self.found[name] |= {key: said[key] for key in ("losses", "peak_gib")}
        self.found[name]["rounds"].append(round(said["answer"], 3))

    def _profile(self, name: str, process: Process) -> None:
        self.found[name]["kernels"] = process.ask("profile")["answer"]

    def numbers(self) -> dict[str, Any]:
        done = {name: of for name, of in self.found.items() if of["rounds"] and name not in self.failed}
        variants = {name: {"step_ms": median(of["rounds"]), **of} for name, of in done.items()}
        return {"variants": variants, "failed": self.failed}


if __name__ == "__main__":
    main()
