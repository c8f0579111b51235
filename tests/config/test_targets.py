"""What `_target_` may build: classes of the kind a key is for. Each attack proves that nothing was run."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import Metric

from inprocess import train_tiny
from lmtrain.config.targets import build_target
from lmtrain.errors import UserError

TIMER = "lightning.pytorch.callbacks.Timer"
RAN: list[str] = []  # what was executed, by those below


class Mine(pl.Callback):
    def __init__(self, number: int, part: Any = None) -> None:
        if number < 0:
            raise ValueError("number is\nnegative")
        self.number, self.part = number, part


class Part:
    def __init__(self, name: str) -> None:
        self.name = name


class NoCallback:
    def __init__(self) -> None:
        RAN.append("NoCallback")


def function(**_: object) -> pl.Callback:
    RAN.append("function")
    return pl.Callback()


def build(entry: dict[str, Any], *allow: str, kind: type = pl.Callback) -> Any:
    return build_target(entry, "callbacks.extra", kind, allow)


# A pickle that, loaded, would write a file; torch.load is what it is fed to.
class Writes:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.touch, (self.marker,))  # type: ignore[return-value]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def attacks(tmp_path: Path, marker: Path) -> dict[str, dict[str, Any]]:
    pickle, hub = tmp_path / "evil.pt", tmp_path / "hub"
    torch.save(Writes(marker), pickle)
    hub.mkdir()
    (hub / "hubconf.py").write_text(f"open({str(marker)!r}, 'w')\ndef model(): pass\n")
    shell = ["/bin/sh", "-c", f"touch {marker}"]
    load = {"_target_": "torch.load", "f": str(pickle), "weights_only": False}
    from_hub = {"_target_": "torch.hub.load", "repo_or_dir": str(hub), "model": "model", "source": "local"}
    run = {"_target_": "torch.utils.collect_env.run", "command": shell}
    build_again = {
        "_target_": "lmtrain.config.targets.build_target",
        "entry": {"_target_": "subprocess.Popen", "args": shell},
    }
    popen = {"_target_": "torch.utils.collect_env.subprocess.Popen", "args": shell}
    handler = {"_target_": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
               "entrypoint": "/bin/sh", "args": ["-c", f"touch {marker}"], "env": {}, "stdout": None, "stderr": None,
               "local_rank_id": 0, "numa_options": None}  # fmt: skip
    found = {"load": load, "hub": from_hub, "run": run, "build_target": build_again, "popen": popen, "handler": handler}
    nested = {f"nested {name}": {"_target_": TIMER, "duration": node} for name, node in found.items()}
    deep = {f"deep {name}": {"_target_": TIMER, "duration": [{"a": [node]}]} for name, node in found.items()}
    positional = {f"positional {name}": {"_target_": TIMER, "_args_": [node]} for name, node in found.items()}
    return found | nested | deep | positional


@pytest.mark.parametrize("how", ["", "nested ", "deep ", "positional "])
@pytest.mark.parametrize("what", ["load", "hub", "run", "build_target", "popen", "handler"])
def test_an_attack_runs_nothing(how: str, what: str, tmp_path: Path, marker: Path) -> None:
    entry = attacks(tmp_path, marker)[how + what]
    with pytest.raises(
        UserError, match=r"is no class|no lightning Callback|outside the known|can't be an argument"
    ) as e:
        build(entry)
    print(e.value)
    assert not marker.exists()


def test_the_same_attacks_run_where_nothing_is_checked(tmp_path: Path, marker: Path) -> None:
    """They are attacks, not typing mistakes: what Hydra alone does with them."""
    from hydra.utils import instantiate

    for name in ("load", "hub", "run"):
        (tmp_path / name).mkdir()
        marker.unlink(missing_ok=True)
        instantiate(attacks(tmp_path / name, marker)[name])
        assert marker.exists(), name


def test_functions_and_other_classes_of_ones_own_packages_are_refused_too() -> None:
    for name, said in (("function", "is no class"), ("NoCallback", "is no lightning Callback")):
        with pytest.raises(UserError, match=said):
            build({"_target_": f"test_targets.{name}"}, "test_targets")
    with pytest.raises(UserError, match=r"run\.allow_target=\[test_targets\]"):
        build({"_target_": "test_targets.Mine", "number": 1})
    assert RAN == []


def test_a_class_of_ones_own_with_its_arguments() -> None:
    part = {"_target_": "test_targets.Part", "name": "wheel"}
    made = build({"_target_": "test_targets.Mine", "number": 3, "part": {"of": [part, 1.5]}}, "test_targets")
    here = sys.modules["test_targets"]
    assert isinstance(made, here.Mine)
    assert (made.number, made.part["of"][0].name, made.part["of"][1]) == (3, "wheel", 1.5)
    assert type(made.part) is dict
    with pytest.raises(UserError, match=r"can't be an argument"):  # re-exported here, but not of this package
        build({"_target_": "test_targets.Mine", "number": 3, "part": {"_target_": "test_targets.Path"}}, "test_targets")


def test_a_metric_takes_metrics_and_modules() -> None:
    inner = {"_target_": "torchmetrics.text.BLEUScore"}
    made = build({"_target_": "torchmetrics.wrappers.MinMaxMetric", "base_metric": inner}, kind=Metric)
    assert isinstance(made._base_metric, Metric)


WRONG = {
    "no callback": ({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "is no lightning Callback"),
    "a typing mistake": ({"_target_": "test_targets.Mine", "numbr": 1},
                         r"Mine got an unexpected keyword argument 'numbr'; did you mean number\? it takes number"),
    "something missing": ({"_target_": "test_targets.Mine"}, r"lacks the argument number; it takes number, part"),
    "an error": ({"_target_": "test_targets.Mine", "number": -1},
                 r"^callbacks\.extra: test_targets\.Mine raised ValueError: number is negative$"),
    "no such module": ({"_target_": "lightning.nothing.Here"}, "can't be imported"),
    "a module": ({"_target_": "lightning.pytorch.callbacks"}, "is no class"),
    "no path": ({"_target_": "Timer"}, "outside the known packages"),
    "a partial": ({"_target_": TIMER, "_partial_": True}, "_partial_ has no meaning here"),
    "nothing": ({"_target_": TIMER, "duration": {"_target_": None}}, "outside the known packages"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_one_message_with_key_class_and_what_would_be_right(case: str) -> None:
    entry, said = WRONG[case]
    with pytest.raises(UserError, match=said) as refusal:
        build(entry, "test_targets")
    assert str(refusal.value).startswith("callbacks.extra: ")
    assert "\n" not in str(refusal.value)


def test_an_attack_on_the_command_line(corpus: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    attack = f"{{_target_: torch.utils.collect_env.run, command: [/bin/sh, -c, 'touch {marker}']}}"
    for key in ("callbacks.extra", "callbacks.samples.metrics"):
        for entry in (attack, f"{{_target_: lmtrain.config.targets.build_target, entry: {attack}}}"):
            ended = train_tiny(corpus, f"run.dir={tmp_path}/run", f"{key}=[{entry}]", "objective.name=causal_lm")
            assert ended.code == 2, ended.err
            assert not marker.exists()
            assert not (tmp_path / "run").exists()
