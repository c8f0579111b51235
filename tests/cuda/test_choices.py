"""Decisions that depend on a GPU, tested on a machine without one."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inprocess import run
from lmtrain.callbacks import step_numbers
from lmtrain.config.compose import check, compose
from lmtrain.config.schema import Config
from lmtrain.distributed import devices
from lmtrain.errors import UserError
from lmtrain.models import fp8
from lmtrain.models.language_model import auto_chunk_bytes
from lmtrain.run import advice as notes
from lmtrain.run import verify
from lmtrain.run.plan_costs import describe_checkpointing
from lmtrain.run_folder import trained


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes torch report one GPU of the given compute capability."""

    def pretend(major: int = 9, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setenv("CC", "true")

    return pretend


@functools.cache
def composed(*overrides: str) -> Config:
    return check(compose(list(overrides)))


def resolved(*overrides: str) -> Config:
    config = copy.deepcopy(composed(*overrides))
    devices.resolve_auto(config)
    return config


def test_blocks_are_compiled_where_they_can_be(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    assert resolved().trainer.compile is True
    assert resolved("trainer.accelerator=cpu").trainer.compile is False
    zero3 = resolved("optimizer=adamw", "trainer.strategy=deepspeed", "trainer.deepspeed.stage=3")
    assert zero3.trainer.compile is False
    assert "ZeRO-3" in str(devices.why_not_compiled(zero3.trainer))
    assert resolved("optimizer=adamw", "trainer.strategy=deepspeed").trainer.compile is True

    monkeypatch.setenv("CC", "no-such-compiler")
    assert resolved().trainer.compile is False
    with pytest.raises(UserError, match=r"trainer\.compile=true: there is no C compiler for Triton"):
        resolved("trainer.compile=true")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="Triton is not installed"):
        resolved("trainer.compile=true")
    gpu(6, 1)
    with pytest.raises(UserError, match=r"compute capability 7\.0 or newer \(here 6\.1\)"):
        resolved("trainer.compile=true")


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch, corpus: Any, tmp_path: Any) -> None:
    """With an old driver torch only says that there is no GPU, and a run would train on the CPU for days."""
    from support import TINY

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update ...")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=r"driver is too old for this torch, which is built with CUDA 13\.0: update"):
        resolved("trainer.accelerator=cuda")
    settings = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    ended = run("train", *settings, "model=llama_nano", "model.intermediate_size=64")
    assert ended.code == 0, ended.err
    assert "the NVIDIA driver is too old for this torch" in " ".join(
        (tmp_path / "run" / "plan.txt").read_text().split()
    )


def test_verify_says_what_a_gpu_promises(gpu: Any) -> None:
    gpu()
    assert "trainer.deterministic=true makes resuming exact" in verify.promise(resolved())
    assert verify.promise(resolved("trainer.deterministic=true")) == ""
    assert verify.promise(resolved("trainer.accelerator=cpu")) == ""


def test_deterministic_algorithms_are_asked_of_torch(corpus: Any, tmp_path: Any) -> None:
    from support import TINY

    settings = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=1", f"run.dir={tmp_path / 'run'}"]
    try:
        ended = run("train", *settings, "trainer.deterministic=true", "model=llama_nano", "model.intermediate_size=64")
        assert ended.code == 0, ended.err
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    wrong = run("train", *settings, "trainer.deterministic=maybe")
    assert wrong.code == 2
    assert "trainer.deterministic=maybe is not known" in wrong.err


def test_text_is_generated_on_the_gpu(gpu: Any) -> None:
    moved: list[str] = []

    class Model:
        config = SimpleNamespace(quantization_config=None)
        to = staticmethod(moved.append)

    trained.place(Model(), "auto")
    assert moved == []
    gpu()
    trained.place(Model(), "cpu")
    assert moved == []
    trained.place(Model(), "auto")
    assert moved == ["cuda"]


def test_the_plan_says_what_keeps_a_gpu_waiting(gpu: Any) -> None:
    gpu()
    weight = torch.nn.Parameter(torch.zeros(1))

    def advice(optimizer: Any, dropout: float, has_router: bool, *overrides: str) -> list[str]:
        model = SimpleNamespace(attention_dropout=dropout, has_router=has_router)
        objective = SimpleNamespace(_optimizer=optimizer, model=model)
        corpus = SimpleNamespace(train=SimpleNamespace())
        run = SimpleNamespace(config=resolved(*overrides), objective=objective, corpus=corpus)
        return notes.for_gpus(run)  # type: ignore[arg-type]

    fused, plain = (torch.optim.AdamW([weight], fused=fused) for fused in (True, None))
    assert advice(fused, 0.1, False) == []
    (note,) = advice(plain, 0.0, True)
    assert "each step waits for the GPU once" in note
    (note,) = advice(fused, 0.1, True, "data.isolate_documents=true")
    assert "model.dropout=0" in note
    (note,) = advice(fused, 0.1, True, "data.isolate_documents=true", "model.attention=slices")
    assert "model.attention=auto doesn't" in note
    assert advice(fused, 0.0, True, "trainer.precision=fp8", "trainer.compile=false") == []
    run = SimpleNamespace(config=resolved("trainer.precision=fp8", "trainer.compile=false"))
    (note,) = fp8.Fp8().advice(run)
    assert "trainer.precision=fp8 without torch.compile" in note
    run.config.trainer.compile = True
    assert fp8.Fp8().advice(run) == []
    (note,) = advice(fused, 0.0, True, "trainer.precision=32-true")
    assert "trainer.precision=bf16-mixed" in note


def test_offloaded_activations_need_a_gpu(gpu: Any) -> None:
    config = check(compose(["trainer.activation_checkpointing=offload", "trainer.accelerator=cpu"]))
    with pytest.raises(UserError, match="activation_checkpointing=true"):
        devices.resolve_auto(config)
    gpu()
    on_gpu = check(compose(["trainer.activation_checkpointing=offload"]))
    devices.resolve_auto(on_gpu)
    assert describe_checkpointing(on_gpu) == ", activation checkpointing (in host memory)"
    with pytest.raises(UserError, match="did you mean selective"):
        check(compose(["trainer.activation_checkpointing=selectiv"]))


def test_what_a_gpu_does_not_tell_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "has_nvml", lambda: False)
    assert notes.not_measured() == ['gpu_utilization and gpu_watts are not logged: pip install "lmtrain[nvml]"']
    monkeypatch.setattr(notes, "has_nvml", lambda: True)
    assert notes.not_measured() == []


def test_what_nvml_can_not_read_is_left_out_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under MIG, for example, utilisation is NotSupported but power is readable."""

    def not_supported(device: Any) -> int:
        raise RuntimeError("Not Supported")  # the text of NVMLError_NotSupported

    monkeypatch.setattr(step_numbers, "_unread", set())
    monkeypatch.setattr(step_numbers, "has_nvml", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", not_supported)
    read, times = [], iter((600.0, 601.0, 629.0, 630.0))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: read.append(1) or 250_000)
    monkeypatch.setattr(step_numbers.time, "monotonic", lambda: next(times))
    step_numbers._nvml_numbers.cache_clear()
    for times_read in (1, 1, 1, 2):  # NVML holds up the host, so it is asked once in 30 s
        numbers = step_numbers.machine_numbers(torch.device("cuda"))
        assert (numbers["gpu_watts"], "gpu_utilization" in numbers, len(read)) == (250, False, times_read)
    said = " ".join(capsys.readouterr().out.split())
    assert said == "note: gpu_utilization is left out of the records: Not Supported"


@pytest.mark.parametrize(("card_gib", "chunk_mib"), [(16, 256), (80, 1280), (141, 2048)])
def test_large_cards_hold_more_logits_at_once(card_gib: int, chunk_mib: int, gpu: Any, monkeypatch: Any) -> None:
    gpu()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(total_memory=card_gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    auto_chunk_bytes.cache_clear()
    try:
        assert auto_chunk_bytes("cuda") == chunk_mib * 2**20
        assert auto_chunk_bytes("cpu") == 256 * 2**20
    finally:
        auto_chunk_bytes.cache_clear()
