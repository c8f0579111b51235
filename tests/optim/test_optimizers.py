"""Each optimizer against an independent reference, and common properties: convergence, decay, exact resume."""

import copy
import dataclasses
import io
import math
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.plugins.precision.amp import _optimizer_handles_unscaling
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.config import compose as rules
from lmtrain.config.options import OPTIMIZERS
from lmtrain.config.schema import OptimizerConfig
from lmtrain.errors import UserError
from lmtrain.optim import muon
from lmtrain.optim.groups import set_lr
from lmtrain.optim.optimizers import build_optimizer
from lmtrain.optim.skipping import can_skip

CONF = Path(__file__).resolve().parents[2] / "conf" / "optimizer"
NAMES = ["adamw", "adamw_8bit", "adafactor", "lion", "muon"]
VOCABULARY, WIDTH = 11, 72  # 8-bit states are used only from 4096 elements on; 72 * 72 is more


class Net(nn.Module):
    """A network with an embedding, a layer with a bias, a norm, three stacked experts and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return self.lm_head(x + torch.einsum("bi,eij->bj", x, self.experts))


def backward(model: nn.Module, step: int) -> float:
    """Runs the backward for one batch of a task that maps each token to another, and returns the loss."""
    tokens = torch.randint(VOCABULARY, (32,), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(tokens), (tokens * 3 + 1) % VOCABULARY)
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def config(name: str, **changes: Any) -> OptimizerConfig:
    """Returns an optimizer's config with its shipped defaults, except for lr."""
    tree = OmegaConf.merge(OmegaConf.load(CONF / "base.yaml"), OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(tree, type(OmegaConf.create({})))
    tree.pop("defaults")
    tree.lr = 1e-2
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    return OPTIMIZERS[name](**{**values, **changes})  # type: ignore[arg-type]


def build(model: nn.Module, name: str, **changes: Any) -> torch.optim.Optimizer:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="the bitsandbytes extra is not installed")
    return build_optimizer(model.named_parameters(), config(name, **changes))


def train_alike(
    model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module, others: list[torch.optim.Optimizer]
) -> None:
    """Takes ten steps with the same gradients for both, so that no rounding is fed back through them."""
    for step in range(10):
        backward(model, step)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        for other in others:
            other.step()


def max_difference(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


# Properties of every optimizer


@pytest.mark.parametrize("name", NAMES)
def test_converges(name: str) -> None:
    model = Net()
    losses = train(model, build(model, name, lr={"lion": 1e-3, "adafactor": 3e-2}.get(name, 1e-2)), range(60))
    assert losses[0] > 2
    assert losses[-1] < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_resumes_bitwise(name: str, dtype: torch.dtype) -> None:
    straight = Net().to(dtype)
    optimizer = build(straight, name)
    train(straight, optimizer, range(5))
    buffer = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    losses = train(straight, optimizer, range(5, 10))

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)  # plain containers and tensors only
    resumed = Net().to(dtype)
    resumed.load_state_dict(saved["model"])
    other = build(resumed, name)
    other.load_state_dict(saved["optimizer"])
    assert train(resumed, other, range(5, 10)) == losses
    assert max_difference(straight, resumed) == 0


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_is_decoupled(name: str) -> None:
    """Without gradients, matrices shrink by lr * weight_decay per step and vectors stay unchanged."""
    model = Net()
    before = copy.deepcopy(model)
    optimizer = build(model, name, lr=0.1, weight_decay=0.2)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        kept = (1 - 0.1 * 0.2) ** 3 if p.ndim >= 2 else 1.0
        torch.testing.assert_close(p, q * kept, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_learning_rate_is_set_from_outside(name: str, reloaded: bool) -> None:
    model = Net()
    optimizer = build(model, name)
    train(model, optimizer, range(1))
    if reloaded:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(model)
    set_lr(optimizer, 0.0)
    train(model, optimizer, range(1, 2))
    assert max_difference(model, before) == 0
    set_lr(optimizer, 0.5)
    train(model, optimizer, range(2, 3))
    assert all((p != q).any() for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_without_a_gradient_is_skipped(name: str) -> None:
    model = Net()
    optimizer = build(model, name)
    before = model.experts.detach().clone()
    backward(model, 0)
    model.experts.grad = None
    optimizer.step()
    assert torch.equal(model.experts, before)
    assert model.experts not in optimizer.state


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_the_closure_gives_the_loss(name: str) -> None:
    """The optimizer's step returns the loss of its closure, through which Lightning steps."""
    model, other = Net(), Net()
    optimizer, plain = build(model, name), build(other, name)
    losses = []
    for step in range(3):
        losses.append(optimizer.step(lambda step=step: backward(model, step)))  # type: ignore[arg-type]
        optimizer.zero_grad()
    assert losses == train(other, plain, range(3))


# Comparisons with references


def test_adamw_is_torchs() -> None:
    model, reference = Net(), Net()
    optimizer = build(model, "adamw")
    assert optimizer.param_groups[0]["fused"] is True
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        foreach=False,
    )
    train_alike(model, optimizer, reference, [plain])
    assert max_difference(model, reference) < 1e-6


def test_lion_is_the_papers() -> None:
    model, reference = Net(), Net()
    lr, decay, (beta1, beta2) = 1e-3, 0.5, (0.9, 0.99)
    optimizer = build(model, "lion", lr=lr, weight_decay=decay)
    momentum = [torch.zeros_like(p) for p in reference.parameters()]
    for step in range(10):
        backward(model, step)
        with torch.no_grad():
            for p, q, m in zip(model.parameters(), reference.parameters(), momentum, strict=True):
                assert p.grad is not None
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                q -= lr * (update + (decay if q.ndim >= 2 else 0.0) * q)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)
        optimizer.step()
        optimizer.zero_grad()
    assert max_difference(model, reference) < 1e-5  # a wrong sign would be 2e-3


def test_adafactor_is_transformers() -> None:
    model, reference = Net(), Net()
    optimizer = build(model, "adafactor")
    theirs = transformers.Adafactor(reference.parameters(), lr=1e-2, relative_step=False, scale_parameter=True)
    train_alike(model, optimizer, reference, [theirs])
    assert max_difference(model, reference) < 1e-6


def test_adafactor_is_torchs() -> None:
    """Equal while lr is below torch's internal cap; torch's eps is applied elsewhere and is too small to matter."""
    model, reference = Net(), Net()
    optimizer = build(model, "adafactor", weight_decay=0.1)
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    theirs = torch.optim.Adafactor(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=1e-2, eps=(1e-15, 1e-3)
    )
    train_alike(model, optimizer, reference, [theirs])
    assert max_difference(model, reference) < 1e-6


def test_adafactor_keeps_float32_state_for_bf16_weights() -> None:
    model = Net().bfloat16()
    optimizer = build(model, "adafactor")
    train(model, optimizer, range(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = optimizer.state[model.up.weight]
    assert {k: (v.dtype, tuple(v.shape)) for k, v in state.items()} == {
        "rest": (torch.int16, (2 * WIDTH, WIDTH)),
        "step": (torch.float32, ()),
        "row": (torch.float32, (2 * WIDTH,)),
        "column": (torch.float32, (WIDTH,)),
    }


def test_muon_and_adamw_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The composite equals torch.optim.Muon and AdamW side by side; experts are left out, as torch's refuses them."""
    monkeypatch.setattr(muon, "cpu_multiplies_bf16", lambda: True)  # torch's Muon does, on every CPU
    model, reference = Net(), Net()
    model.experts.requires_grad_(False)
    reference.experts.requires_grad_(False)
    start = copy.deepcopy(model)
    optimizer = build(model, "muon")
    hidden = [reference.up.weight, reference.down.weight]
    rest = [reference.embed.weight, reference.lm_head.weight]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    parts = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.95),
        ),
    ]
    train_alike(model, optimizer, reference, parts)
    moved = torch.cat([(p - s).flatten() for p, s in zip(hidden, (start.up.weight, start.down.weight), strict=True)])
    error = torch.cat([(p - q).flatten() for p, q in zip(hidden, (model.up.weight, model.down.weight), strict=True)])
    # bf16 products, whose rounding depends on the CPU's kernels
    assert error.norm() / moved.norm() < 1e-2
    for p, q in [(model.embed, reference.embed), (model.lm_head, reference.lm_head), (model.norm, reference.norm)]:
        assert (p.weight - q.weight).abs().max() < 1e-6


def test_muon_is_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, Muon equals the published algorithm in float64, matrix by matrix, including experts."""
    monkeypatch.setattr(muon, "cpu_multiplies_bf16", lambda: False)
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(s)) for s in ((8, 24), (24, 8), (8, 24), (3, 8, 6))]
    reference = [p.detach().double() for p in parameters]
    momentum = [torch.zeros_like(p) for p in reference]
    optimizer = muon.Muon(parameters, lr=0.1, weight_decay=0.2)
    for _ in range(4):
        for p in parameters:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        for p, r, m in zip(parameters, reference, momentum, strict=True):
            g = p.grad.double()  # type: ignore[union-attr]
            m.copy_(0.95 * m + g)  # Jordan's momentum is a sum; the scale cancels in the orthogonalization
            nesterov = g + 0.95 * m
            for expert, update in zip(r.reshape(-1, *r.shape[-2:]), nesterov.reshape(-1, *r.shape[-2:]), strict=True):
                x = update / update.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                expert.mul_(1 - 0.1 * 0.2).sub_(x, alpha=0.1 * 0.2 * math.sqrt(max(expert.shape)))
    for p, r in zip(parameters, reference, strict=True):
        torch.testing.assert_close(p.double(), r, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_a_step_found_bad_on_the_device_changes_nothing(name: str) -> None:
    """As in CUDA's fused kernels, `found_inf` is a tensor, so the host needn't wait for the device."""
    plain, asked = Net(), Net()
    one, other = build(plain, name), build(asked, name)
    assert can_skip(other)
    other.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for model, optimizer in ((plain, one), (asked, other)):
        backward(model, 0)
        optimizer.step()
    assert max_difference(plain, asked) < 1e-6  # lr * update is rounded once more
    before = copy.deepcopy(values(asked, other))
    for parameter in asked.parameters():
        parameter.grad.fill_(float("nan"))
    other.found_inf = torch.ones(())  # type: ignore[attr-defined]
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(values(asked, other), before, strict=True))


def test_adafactor_leaves_out_a_first_step() -> None:
    """Its running means are still zero then, and nothing may be divided by them."""
    model, expected = Net(), Net()
    optimizer, plain = build(model, "adafactor"), build(expected, "adafactor")
    before = copy.deepcopy(model)
    backward(model, 0)
    for parameter in model.parameters():
        parameter.grad.fill_(float("inf"))
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    assert max_difference(model, before) == 0
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    assert train(model, optimizer, range(3)) == pytest.approx(train(expected, plain, range(3)), rel=1e-5)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns weights and optimizer state."""
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [*model.parameters(), *state]


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_twice_the_parameters_take_no_more_kernels(name: str) -> None:
    counts = []
    for layers in (2, 4):
        weights = [(f"layer{i}.weight", nn.Parameter(torch.randn(8, 8))) for i in range(layers)]
        optimizer = build_optimizer(weights, config(name))
        for _, weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()  # creates the state
        with Count() as count:
            optimizer.step()
        counts.append(count.calls)
    assert counts[0] == counts[1] < 40, counts


class Count(TorchDispatchMode):
    """Counts operations that would be kernels; a call for a list of tensors counts once."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(5, 40, 16), (5, 16, 40), (5, 24, 24)])
def test_orthogonalize_keeps_singular_vectors(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = muon.orthogonalize(matrices).float()
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    along = torch.einsum("nik,nij,nkj->nk", u, result, vh)  # the new values of the singular values
    large = s > 0.05 * s.amax(-1, keepdim=True)
    assert ((along > 0.6) & (along < 1.3))[large].all()
    assert torch.allclose(muon.orthogonalize(1000 * matrices).float(), result, atol=0.05)  # scale-free
    assert torch.equal(muon.orthogonalize(torch.zeros(shape)).float(), torch.zeros(shape))


def test_muon_in_small_batches_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[nn.Parameter]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(6, 4)) for _ in range(5)]
        for p in parameters:
            p.grad = torch.randn(p.shape)
        muon.Muon(parameters, lr=0.1).step()
        return parameters

    together = run()
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 2 * 6 * 4)
    for p, q in zip(together, run(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-3)


# The composite of Muon and AdamW


def test_the_composite_is_one_optimizer() -> None:
    model = Net()
    optimizer = build(model, "muon")
    train(model, optimizer, range(1))
    assert [g["name"] for g in optimizer.param_groups] == ["muon/decay", "adamw/decay", "adamw/no_decay"]
    assert set(optimizer.state) == set(model.parameters())
    assert set(optimizer.state[model.experts]) == {"momentum"}
    assert set(optimizer.state[model.lm_head.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(g["fused"] is True for g in optimizer.param_groups if g["algorithm"] == "adamw")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])  # noqa: S301
def test_the_composite_can_be_copied(duplicate: Any) -> None:
    model = Net()
    optimizer = build(model, "muon")
    train(model, optimizer, range(2))
    twin, twin_optimizer = duplicate((model, optimizer))
    assert train(twin, twin_optimizer, range(2, 4)) == train(model, optimizer, range(2, 4))
    assert max_difference(model, twin) == 0


def test_the_composite_runs_with_one_part_only() -> None:
    for pattern, algorithms in (("up|down|experts|embed|lm_head", {"adamw"}), ("nothing", {"muon", "adamw"})):
        model = Net()
        optimizer = build(model, "muon", adamw_pattern=pattern)
        assert {g["algorithm"] for g in optimizer.param_groups} == algorithms
        train(model, optimizer, range(2))
    matrices = nn.ParameterDict({"hidden": nn.Parameter(torch.randn(4, 4))})
    optimizer = build(matrices, "muon")
    matrices["hidden"].grad = torch.ones(4, 4)
    optimizer.step()
    assert set(optimizer.state[matrices["hidden"]]) == {"momentum"}


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    """Under 16-mixed, Lightning leaves unscaling to an optimizer that claims it, but only after clipping: too late."""
    for name in ("adamw", "muon"):
        assert not _optimizer_handles_unscaling(build(Net(), name))


# 8-bit AdamW


def test_8_bit_adamw_keeps_embeddings_in_32_bits() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(WIDTH, WIDTH), "up": nn.Linear(WIDTH, WIDTH)})
    optimizer = build(model, "adamw_8bit")
    other = build(Net(), "adamw_8bit", full_state_pattern="nothing")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.state[model["embed"].weight]["state1"].dtype == torch.float32
    assert optimizer.state[model["up"].weight]["state1"].dtype == torch.uint8
    assert not other.mng.index2config  # type: ignore[attr-defined]


def test_8_bit_adamw_stays_near_adamw() -> None:
    model, reference = Net(), Net()
    start = copy.deepcopy(model)
    eight = train(model, build(model, "adamw_8bit", lr=1e-3), range(20))
    full = train(reference, build(reference, "adamw", lr=1e-3), range(20))
    assert eight == pytest.approx(full, abs=0.05)
    assert max_difference(model, reference) < 0.5 * max_difference(start, reference)


def test_a_missing_bitsandbytes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=r'pip install "lmtrain\[bitsandbytes\]"'):
        build_optimizer(Net().named_parameters(), config("adamw_8bit"))


# The shipped configs and wrong values


def test_there_is_a_yaml_for_every_optimizer() -> None:
    assert {p.stem for p in CONF.glob("*.yaml")} == {*NAMES, "base", "custom"}


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_yaml_is_an_option_of_its_own(name: str) -> None:
    """If the key is missing, the config is refused."""
    common, own = ({f.name for f in dataclasses.fields(cls)} for cls in (OptimizerConfig, OPTIMIZERS[name]))
    plain = rules.to_plain(rules.check(rules.compose([f"optimizer={name}"])))
    assert set(plain["optimizer"]) == own - {"_target_"}
    for key in own - common:
        section = {k: v for k, v in plain["optimizer"].items() if k != key}
        with pytest.raises(UserError, match=rf"needs optimizer\.{key}: choose optimizer={name}"):
            rules.check({**plain, "optimizer": section})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("adamw", "eps=-1.0"),
        ("lion", "betas=[0.9,1.0]"),
        ("muon", "momentum=1.0"),
        ("adafactor", "min_parameter_rms=-1.0"),
    ],
)
def test_values_out_of_range_are_explained(name: str, wrong: str) -> None:
    key, _, value = wrong.partition("=")
    with pytest.raises(UserError, match=re.escape(f"optimizer.{key}={value}".replace(",", ", "))):
        rules.check(rules.compose([f"optimizer={name}", f"optimizer.{wrong}"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.name=adma", "did you mean adamw.*options: adamw, adamw_8bit, adafactor, lion, muon"),
        ("optimizer.name=custom", "choose optimizer=custom"),
        ("optimizer.betas=0.9", r"optimizer\.betas=0\.9: two numbers"),
        ("optimizer.betas=[0.9]", r"optimizer\.betas=\[0\.9\]: two numbers"),
        ("optimizer.betas=[0.9,1.5]", r"optimizer\.betas=\[0\.9, 1\.5\]: two numbers"),
        ("optimizer.fused=false", r"no key 'optimizer\.fused': AdamW is always torch's fused kernel.*leave it out"),
        ("+optimizer.fused=false", r"no key 'optimizer\.fused': AdamW is always torch's fused kernel.*leave it out"),
        (
            "+optimizer.momentum=0.9",
            r"optimizer\.momentum has no meaning with the optimizer .* optimizer=muon",
        ),
    ],
)
def test_wrong_values_in_a_config_are_explained(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rules.check(rules.compose(["optimizer=adamw", override]))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_that_was_not_fused_goes_on_fused(name: str) -> None:
    """A state saved with optimizer.fused=false, a key of earlier versions, continues with fused kernels."""
    model, other = Net(), Net()
    optimizer, resumed = build(model, name), build(other, name)
    for group in optimizer.param_groups:
        if "fused" in group:
            group["fused"] = None
    train(model, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [g["fused"] for g in resumed.param_groups if "fused" in g] == [True, True]
    assert can_skip(resumed)
    # One step: AdamW's two kernels differ by 1e-8, which Muon's bf16 products amplify to 6e-4 in the next step.
    train(model, optimizer, range(2, 3))
    train(other, resumed, range(2, 3))
    assert max_difference(model, other) < 1e-6


def test_a_class_of_ones_own_gets_the_sections_keys_and_what_it_takes_of_rate_and_decay() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Own(OptimizerConfig):
        momentum: Any

    def built(target: str, **changes: Any) -> torch.optim.Optimizer:
        cfg = Own(name="custom", _target_=target, lr=0.25, weight_decay=0.125, groups=[], momentum=0.5)
        return build_optimizer(Net().named_parameters(), dataclasses.replace(cfg, **changes), ["test_optimizers"])

    sgd = built("torch.optim.SGD")
    assert isinstance(sgd, torch.optim.SGD)
    assert {(g["lr"], g["weight_decay"], g["momentum"]) for g in sgd.param_groups} == {
        (0.25, 0.125, 0.5),
        (0.25, 0.0, 0.5),
    }
    assert sgd.defaults["weight_decay"] == 0.125
    assert not _optimizer_handles_unscaling(sgd), "gradients are clipped after lmtrain's unscaling"
    assert not can_skip(sgd)
    plain = built("test_optimizers.WithoutDecay")
    assert plain.defaults == {"momentum": 0.5}


class WithoutDecay(torch.optim.Optimizer):
    """Takes neither a rate nor a decay; the groups bring theirs."""

    def __init__(self, params: Any, momentum: float) -> None:
        super().__init__(params, {"momentum": momentum})
