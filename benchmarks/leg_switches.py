"""One step in several variants, in one process, in turns of a few steps (A B A B): milliseconds of each turn.

Every variant has its own model and optimizer and sees the same batches, so the losses after the last step tell whether
it learns the same. Run by gpu_queue.py: python leg_switches.py spec.json
SPEC: {"overrides": [...], "variants": {name: {...}}, "turns": N, "steps": steps of a turn}; a variant may have
"overrides", "inductor" (options of torch.compile), "one_region" (the decoder, instead of each block) and "attention"
(the names of the kernels that F.scaled_dot_product_attention may choose).
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from leg_bare import read_steps
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmtrain.config import compose as config
from lmtrain.data.text.windows import IGNORE
from lmtrain.distributed import devices
from lmtrain.models.blocks import compile_model
from lmtrain.run import build


class Variant:
    """A model and an optimizer, and how they are compiled."""

    def __init__(self, spec: dict[str, Any], own: dict[str, Any], steps: int) -> None:
        cfg = config.check(config.compose([*spec["overrides"], *own.get("overrides", [])]))
        devices.resolve_auto(cfg)
        compiled = bool(cfg.trainer.compile)
        cfg.trainer.compile = False  # compiled below
        self.config, corpus = cfg, build.build_corpus(cfg)
        objective = build.build_objective(cfg, corpus, steps).to(cfg.trainer.accelerator)
        self.model, self.optimizer = objective.model, objective.configure_optimizers()
        self.batches = read_steps(cfg, corpus, steps)
        self.kernels = [getattr(SDPBackend, name) for name in own.get("attention", [])]
        self.done, self.loss = 0, torch.zeros(())
        if not compiled:
            return

        # A function of its own keeps torch from using the code that it generated for another variant.
        def backend(graph: Any, inputs: Any) -> Any:
            return _inductor(own.get("inductor", {}), graph, inputs)

        if own.get("one_region"):
            self.model.model.base_model.compile(backend=backend)
            self.model._compiled = lambda: True  # the loss too
        else:
            compile_model(self.model.model, backend=backend)  # type: ignore[arg-type]

    def turn(self, steps: int) -> float:
        """Trains on the next batches; returns milliseconds a step."""
        device = self.config.trainer.accelerator
        _wait(device)
        began = time.perf_counter()
        with sdpa_kernel(self.kernels) if self.kernels else contextlib.nullcontext():
            for micro_batches in self.batches[self.done : self.done + steps]:
                self._step(micro_batches, device)
        _wait(device)
        self.done += steps
        return 1000 * (time.perf_counter() - began) / steps

    def _step(self, micro_batches: list[dict[str, torch.Tensor]], device: str) -> None:
        n_tokens = sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
        mixed = self.config.trainer.precision == "bf16-mixed"
        with torch.autocast(device, torch.bfloat16) if mixed else contextlib.nullcontext():
            for batch in micro_batches:
                out = self.model(**{k: v.to(device, non_blocking=True) for k, v in batch.items()})
                (out.loss_sum / n_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.trainer.gradient_clip_val)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = out.nll_sum.detach() / n_tokens


def _inductor(options: dict[str, Any], graph: Any, inputs: Any) -> Any:
    if not torch.cuda.is_available():
        return graph  # without inductor, whose C++ takes long to compile
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=options)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    steps = spec["steps"] * (spec["turns"] + 1)  # the first turn compiles
    variants, failed = {}, {}
    for name, own in spec["variants"].items():
        try:
            made = Variant(spec, own, steps)
            made.turn(spec["steps"])
            variants[name] = made
        except Exception as error:  # one that can't run here must not stop the others
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(spec["turns"]):
        for name, variant in variants.items():
            times[name].append(round(variant.turn(spec["steps"]), 3))
    found = {
        name: {"step_ms": median(of), "rounds": of, "last_loss": float(variants[name].loss)}
        for name, of in times.items()
    }
    print(json.dumps({"variants": found, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
