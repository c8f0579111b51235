"""Runs of lmtrain on a CUDA device that isn't there: `python fake_runs.py LIBRARY FOLDER < CASES > RESULTS`.

CASES is a JSON object {name: overrides}, RESULTS one of {name: what was observed}. lmtrain's own build.py builds the
runs and its Trainer trains them with all callbacks; only tensors are fake: they have a shape, a dtype and a device, but
no values.
"""

import contextlib
import gc
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import library

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
if __name__ == "__main__":
    library.load(sys.argv[1])

import torch

# Imported before a device seems to be there, since it would look for its CUDA kernels. It decorates functions that
# are not called here with torch.compile, for which torch would load all of inductor.
with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda found: found)):
    import bitsandbytes as bnb
import lightning.pytorch as pl
import numpy as np
import peft  # noqa: F401
import torch.distributed as distributed
from lightning.pytorch.strategies import model_parallel
from pretended import fused_attention, pretend
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed import fake_pg
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from watch import Watch

import composed_once
from lmtrain.adapters import memory_adapter, quantized
from lmtrain.callbacks.stopping import Preemption
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.config.compose import check, compose
from lmtrain.data.modules import TokenDataModule
from lmtrain.distributed import devices, process_group
from lmtrain.models import folder as model_folder
from lmtrain.models import probe
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives import with_reference
from lmtrain.objectives.reference import Precomputed
from lmtrain.run import build
from lmtrain.run_folder.folder import RunDir

aten = torch.ops.aten
ATTENTION = "scaled_dot_product_attention"
real_attention, probe_support = getattr(torch.nn.functional, ATTENTION), probe.support
STEPS = 3  # rows are logged at steps 1 and 3, so nothing may wait for the device in step 2
FIXED = [
    "trainer.accelerator=cuda", "trainer.devices=1", "trainer.compile=false", f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=100", "trainer.val_check_interval=null", "trainer.limit_val_batches=1",
    "callbacks.samples.every_n_validations=0", "callbacks.progress.style=none", "logger=none", "export.enabled=false",
]  # fmt: skip


def without_values(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """Replaces tensors read from files with fake ones; tied ones stay tied, 4-bit scales lie on the device."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            with fake:
                _fake_state(module.quant_state, fake)
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                if id(parameter) not in made:
                    tensor = fake.from_tensor(parameter.detach(), static_shapes=True)
                    made[id(parameter)] = torch.nn.Parameter(tensor, parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                module._buffers[name] = fake.from_tensor(buffer, static_shapes=True)
    return model


def _fake_state(state: Any, fake: FakeTensorMode) -> None:
    """Replaces the scales of a 4-bit weight with fake tensors, and with double quantisation the scales of those."""
    for name in ("absmax", "code", "offset"):
        tensor = getattr(state, name)
        if tensor is not None:
            setattr(state, name, fake.from_tensor(tensor, static_shapes=True).to("cuda"))
    if state.state2 is not None:
        _fake_state(state.state2, fake)


def keep_state(module: Any) -> None:
    """Replaces bitsandbytes' function, which checks for a class of weight that a fake tensor can't have."""
    module.weight.quant_state = module.quant_state


class EndOfTraining(pl.Callback):
    """A callback that checks where tensors lie when training ends, before Lightning takes the model off the device."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.off_device = watch, list[str]()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.watch.step = 0
        tensors = {**pl_module.state_dict(), **dict(enumerate(trained(pl_module)))}
        # bitsandbytes adds a description of each 4-bit weight, made on the host.
        tensors = {name: t for name, t in tensors.items() if "quant_state.bitsandbytes__" not in str(name)}
        self.off_device = [str(name) for name, t in tensors.items() if t.device.type != "cuda"]


def no_reference(self: Precomputed, model: Any, splits: dict[str, Any], numbers: Any) -> None:
    for rows in splits.values():
        rows.reference = np.zeros((len(rows), 2))


def trained(module: Any) -> list[torch.Tensor]:
    """Returns the optimizer's parameters."""
    return [p for group in module._optimizer.param_groups for p in group["params"]]


class Batches:
    """A data loader whose items are read while tensors are real, and yielded as fake tensors on the host."""

    def __init__(self, dataset: Any, indices: list[int], fake: FakeTensorMode, watch: Watch, train: bool) -> None:
        self.dataset, self.watch, self.train = dataset, watch, train
        read = [dataset[i] for i in indices]
        to_fake = lambda t: fake.from_tensor(t, static_shapes=True)  # noqa: E731
        self.items = [torch.utils._pytree.tree_map_only(torch.Tensor, to_fake, item) for item in read]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        for number, item in enumerate(self.items, start=1):
            if self.train:
                self.watch.step = number
            yield item


def run(name: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Trains STEPS steps, validates and saves; returns what was observed of the device."""
    fake, watch = FakeTensorMode(allow_non_fake_inputs=True), Watch()
    loading_options = quantized.loading_options
    config = check(compose([*FIXED, *overrides, f"run.dir={folder / name}"]))
    devices.resolve_auto(config)
    real_objective, real_model = build.build_objective, build.build_trainable_model

    def objective(*args: Any) -> Any:
        with fake, watch:
            return real_objective(*args)

    def model(*args: Any) -> Any:
        if config.peft.quantization is None:
            return without_values(real_model(*args), fake)
        with _disable_current_modes():  # quantising needs real values
            whole = real_model(*args)
        return without_values(whole, fake)

    def loader(self: TokenDataModule, dataset: Any, sampler: Any) -> Batches:
        indices = list(sampler) if sampler is not None else list(range(len(dataset)))
        with unset_fake_temporarily():
            return Batches(dataset, indices, fake, watch, train=sampler is not None)

    def real_support(*args: Any) -> probe.Support:
        """Tries the tiny copy, whose values are compared, on real tensors and with the real attention."""
        with _disable_current_modes(), mock.patch.object(torch.nn.functional, ATTENTION, real_attention):
            return probe_support(*args)

    run_folder = RunDir(folder / name)
    run_folder.path.mkdir(parents=True)
    patches = [
        mock.patch.object(build, "build_objective", objective),
        mock.patch.object(build, "build_trainable_model", model),
        mock.patch.object(TokenDataModule, "_loader", loader),
        mock.patch.object(FolderCheckpointIO, "_publish"),
        mock.patch.object(
            quantized, "loading_options", lambda cfg, precision, *_, **__: loading_options(cfg, precision, "cpu")
        ),
        mock.patch.object(bnb.nn.modules, "fix_4bit_weight_quant_state_from_module", keep_state),
        *ranks_of(config.trainer),
        mock.patch.object(probe, "support", real_support),
        # These look at values before training.
        mock.patch.object(with_reference, "first_values_hash", return_value=""),
        mock.patch.object(Precomputed, "find", no_reference),
        mock.patch.object(LanguageModel, "_compare_logits"),
        mock.patch.object(memory_adapter, "check_start"),
        mock.patch.object(model_folder, "check_finite"),
        # Several chunks in a micro-batch, whose gradients are summed.
        *([mock.patch.object(LanguageModel, "_chunk", return_value=4096)] if name == "pretraining_gpt2" else []),
        # Lightning deep-copies what is logged, including the storage.
        mock.patch.object(pl.LightningModule, "log_dict"),
        # With this, torch.tensor(.., device="cuda") is made on the host and copied.
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
        # Without kernels torch would decompose it into its parts.
        mock.patch.object(torch.nn.functional, ATTENTION, fused_attention),
        # Fake parameters are moved by swapping, which torch refuses for tensors that have weak references.
        mock.patch.object(torch.utils.weakref, "getweakrefs", return_value=[]),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(end_group)
        built = build.build(config, run_folder, Console(quiet=True), time.time())
        end = EndOfTraining(watch)
        built.trainer.callbacks.append(end)
        with fake, watch:
            built.trainer.fit(built.objective, datamodule=built.datamodule)
    assert built.trainer.global_step == STEPS
    return {
        "waits": watch.waits,
        "products": dict(watch.products),
        "operations": [watch.operations[step] for step in range(1, STEPS + 1)],
        "off_device": end.off_device,
        "fp32_sums": watch.fp32_sums,
    }


class _Stream:
    """A stand-in for streams and events of a device that is always idle."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> "_Stream":
        return self

    record_event = record

    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None:
        raise AssertionError("the host waits for a stream")


def end_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def ranks_of(trainer: Any) -> list[Any]:
    """Returns patches that sharding needs besides a device: streams, and rank 0 of a group that sends nothing."""
    if trainer.strategy != "fsdp":
        return []
    number = int(trainer.devices)
    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=number)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "0"}
    mesh = model_parallel._setup_device_mesh

    def real_mesh(*args: Any) -> Any:
        with unset_fake_temporarily():
            return mesh(*args)

    return [
        *([mock.patch.dict(os.environ, {**rank, **address})] if number > 1 else []),
        mock.patch.object(process_group, "size", return_value=1),  # skips what ranks exchange before training
        mock.patch.object(Preemption, "_end"),  # a made-up sum would say that a rank was asked to stop
        mock.patch.object(torch.cuda, "Stream", _Stream),
        mock.patch.object(torch.cuda, "Event", _Stream),
        mock.patch.object(torch.cuda, "current_stream", return_value=_Stream()),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(model_parallel, "_setup_device_mesh", real_mesh),
        mock.patch.object(model_parallel.ModelParallelStrategy, "broadcast", lambda self, obj, src=0: obj),
    ]


def main() -> None:
    for supported in (sys.modules["torch.optim.optimizer"], _foreach_utils):
        supported._foreach_supported_types.append(FakeTensor)  # as for tensors on CUDA
    cases, folder = json.load(sys.stdin), Path(sys.argv[2])
    gc.disable()  # fake tensors hold no memory; collecting takes a tenth of the time
    results: dict[str, Any] = {}
    composed_once.install()
    with pretend(), contextlib.redirect_stdout(io.StringIO()):
        for name, overrides in cases.items():
            started = time.process_time()
            try:
                results[name] = run(name, overrides, folder)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
            results[name]["seconds"] = time.process_time() - started
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
