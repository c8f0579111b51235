"""What `_target_` may build: classes of the kind that a key expects. Each attack test checks that nothing was run."""

import ast
import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import Metric
from transformers import PreTrainedModel

from inprocess import train_tiny
from lmtrain.callbacks import extra
from lmtrain.config import compose as rules
from lmtrain.config import targets
from lmtrain.config.targets import build_target, find_class
from lmtrain.data.sources import choose
from lmtrain.errors import UserError
from lmtrain.objectives.base import Objective
from lmtrain.optim.optimizers import build_optimizer
from lmtrain.optim.schedules import LRSchedule
from started import STARTED
from support import REPO

TIMER = "lightning.pytorch.callbacks.Timer"
RAN: list[str] = []  # names of what the classes below executed


class Mine(pl.Callback):
    def __init__(self, number: int, part: Any = None) -> None:
        if number < 0:
            raise ValueError("number is\nnegative") if number == -1 else SystemExit("bye")
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


# A pickle that would write a file when loaded; the attacks pass it to torch.load.
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


class PlainModule(pl.LightningModule):
    """As users bring it from another project."""


def test_a_lightning_module_is_shown_the_way() -> None:
    with pytest.raises(UserError, match=r"derive it from lmtrain\.objectives\.base\.Objective; .* docs/lightning\.md"):
        find_class(f"{__name__}.PlainModule", "objective", Objective, [__name__])  # type: ignore[type-abstract]


@pytest.mark.parametrize("how", ["", "nested ", "deep ", "positional "])
@pytest.mark.parametrize("what", ["load", "hub", "run", "build_target", "popen", "handler"])
def test_an_attack_runs_nothing(how: str, what: str, tmp_path: Path, marker: Path) -> None:
    entry = attacks(tmp_path, marker)[how + what]
    with pytest.raises(
        UserError, match=r"is not a class|is not a Callback|outside the known|can't be an argument|can't name what"
    ) as e:
        build(entry)
    print(e.value)
    assert not marker.exists()


def test_the_same_attacks_run_where_nothing_is_checked(tmp_path: Path, marker: Path) -> None:
    """Hydra alone executes the same entries, so they are attacks and not typing mistakes."""
    from hydra.utils import instantiate

    for name in ("load", "hub", "run"):
        (tmp_path / name).mkdir()
        marker.unlink(missing_ok=True)
        instantiate(attacks(tmp_path / name, marker)[name])
        assert marker.exists(), name


def test_functions_and_other_classes_of_ones_own_packages_are_refused_too() -> None:
    for name, said in (("function", "is not a class"), ("NoCallback", "is not a Callback")):
        with pytest.raises(UserError, match=said):
            build({"_target_": f"test_targets.{name}"}, "test_targets")
    with pytest.raises(UserError, match=r"run\.allow_target=\[test_targets\]"):
        build({"_target_": "test_targets.Mine", "number": 1})
    assert RAN == []


@pytest.mark.parametrize("regular", ["", "own_things", "own_things/deep"])
def test_a_class_in_folders_without_init(regular: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_things/deep").mkdir(parents=True)
    (tmp_path / "own_things/deep/parts.py").write_text("from torch import nn\nclass Own(nn.Module):\n    pass\n")
    if regular:
        (tmp_path / regular / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        made = build({"_target_": "own_things.deep.parts.Own"}, "own_things", kind=torch.nn.Module)
        assert type(made).__module__ == "own_things.deep.parts"
        with pytest.raises(UserError, match="looked for in the folder where python -m is started"):
            build({"_target_": "own_thingz.deep.parts.Own"}, "own_thingz", kind=torch.nn.Module)
    finally:
        for name in ("own_things.deep.parts", "own_things.deep", "own_things"):
            sys.modules.pop(name, None)


def test_a_class_of_ones_own_with_its_arguments() -> None:
    part = {"_target_": "test_targets.Part", "name": "wheel"}
    made = build({"_target_": "test_targets.Mine", "number": 3, "part": {"of": [part, 1.5]}}, "test_targets")
    here = sys.modules["test_targets"]
    assert isinstance(made, here.Mine)
    assert (made.number, made.part["of"][0].name, made.part["of"][1]) == (3, "wheel", 1.5)
    assert type(made.part) is dict
    with pytest.raises(
        UserError, match=r"which test_targets only imports"
    ):  # imported here, but from outside this package
        build({"_target_": "test_targets.Mine", "number": 3, "part": {"_target_": "test_targets.Path"}}, "test_targets")


def test_a_metric_takes_metrics_and_modules() -> None:
    inner = {"_target_": "torchmetrics.text.BLEUScore"}
    made = build({"_target_": "torchmetrics.wrappers.MinMaxMetric", "base_metric": inner}, kind=Metric)
    assert isinstance(made._base_metric, Metric)


WRONG = {
    "no callback": ({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "is not a Callback"),
    "a typing mistake": ({"_target_": "test_targets.Mine", "numbr": 1},
                         r"Mine got an unexpected keyword argument 'numbr'; did you mean number\? it takes number"),
    "something missing": ({"_target_": "test_targets.Mine"}, r"lacks the argument number; it takes number, part"),
    "an error": ({"_target_": "test_targets.Mine", "number": -1},
                 r"^callbacks\.extra: test_targets\.Mine raised ValueError: number is negative$"),
    "an exit": ({"_target_": "test_targets.Mine", "number": -2}, "Mine raised SystemExit: bye"),
    "no such module": ({"_target_": "lightning.nothing.Here"}, "can't be imported"),
    "a module": ({"_target_": "lightning.pytorch.callbacks"}, "is not a class"),
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


def test_a_module_that_exits_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that reads its command line would else end the run, with the exit code 0."""
    (tmp_path / "my_script.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"_target_=my_script\.Mine can't be imported: SystemExit: 0"):
        build({"_target_": "my_script.Mine"}, "my_script")


def test_an_attack_on_the_command_line(corpus: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    attack = f"{{_target_: torch.utils.collect_env.run, command: [/bin/sh, -c, 'touch {marker}']}}"
    for key in ("callbacks.extra", "callbacks.samples.metrics"):
        for entry in (attack, f"{{_target_: lmtrain.config.targets.build_target, entry: {attack}}}"):
            ended = train_tiny(corpus, f"run.dir={tmp_path}/run", f"{key}=[{entry}]", "objective.name=causal_lm")
            assert ended.code == 2, ended.err
            assert not marker.exists()
            assert not (tmp_path / "run").exists()


# Attributes of known modules that are other modules, or names that those modules only import.
ALIASES = [
    "torch.utils.cpp_extension.subprocess.Popen",
    "torch.nn.modules.module.functools.partial",
    "torch.optim.optimizer.functools.partial",
    "torch.optim.optimizer.defaultdict",
    "transformers.utils.import_utils.subprocess.Popen",
    "transformers.models.auto.auto_factory.importlib.machinery.SourceFileLoader",
    "lightning.pytorch.callbacks.model_checkpoint.Path",
    "lightning.pytorch.callbacks.timer.timedelta",
    "lightning.pytorch.callbacks.model_checkpoint.shutil.rmtree",
    "torchmetrics.text.rouge.os.system",
    "setuptools._distutils.spawn.spawn",
    "lmtrain.train.main",
    "lmtrain.planning.trial.main",
    "lmtrain.generation.text_metrics.__builtins__.exec",
    "torch.nn.Module.__subclasses__",
    "torch.nn.__loader__.SourceFileLoader",
    "transformers.commands.transformers_cli.main",
    "torch.utils.benchmark.__main__.main",
    "torch..nn.Linear",
    "torch.nn.Linear\n.x",
]


@pytest.mark.parametrize("target", ALIASES)
def test_no_way_through_known_modules_leads_elsewhere(target: str) -> None:
    for kind in (pl.Callback, Metric, object):
        for entry in ({"_target_": target}, {"_target_": TIMER, "duration": {"_target_": target}}):
            with pytest.raises(UserError, match=r"^callbacks\.extra: "):
                build(entry, kind=kind)


def test_a_module_outside_the_places_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("torch.utils.benchmark.examples.compare", "torch.nn.modules._functions", "lmtrain.planning.trial",
             "torch.testing._internal.common_utils")  # fmt: skip
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(UserError, match=f"can't name what {name} holds"):
            build({"_target_": f"{name}.Anything"})
        assert name not in sys.modules


def test_the_known_classes_are_found_by_all_their_names() -> None:
    for target, kind in {
        "lightning.pytorch.callbacks.Timer": pl.Callback,
        "lightning.pytorch.callbacks.timer.Timer": pl.Callback,
        "torch.optim.RAdam": torch.optim.Optimizer,
        "torch.optim.Adafactor": torch.optim.Optimizer,
        "torchmetrics.text.BLEUScore": Metric,
        "transformers.LlamaForCausalLM": torch.nn.Module,
        "transformers.models.llama.LlamaForCausalLM": torch.nn.Module,
        "transformers.Adafactor": torch.optim.Optimizer,
        "lmtrain.callbacks.stopping.EndsEarly": pl.Callback,
    }.items():
        assert issubclass(find_class(target, "key", kind), kind)


def test_a_text_with_an_interpolation_is_handed_over_as_it_is() -> None:
    """An interpolation in an argument stays text, since the config was resolved before a class is built."""
    for text in ("${oc.env:HOME}", r"\${oc.env:HOME}", "${", "${oc.create:'{_target_: os.system, command: ls}'}"):
        made = build({"_target_": "test_targets.Mine", "number": 1, "part": [text, {"a": text}]}, "test_targets")
        assert made.part == [text, {"a": text}]


def test_nothing_is_constructed_before_all_of_it_has_passed() -> None:
    inner = {"_target_": "test_targets.NoCallback"}
    with pytest.raises(UserError, match="is not a class"):
        build(
            {"_target_": "test_targets.Mine", "number": 1, "part": [inner, {"_target_": "torch.load"}]}, "test_targets"
        )
    assert RAN == []


def test_an_optimizers_arguments_go_by_the_same_rule() -> None:
    for inner, said in (
        ("torch.utils.collect_env.run", "can't name what"),
        ("torch.nn.functional.relu", "is not a class"),
    ):
        config = rules.check(rules.compose([*ADAM, f"+optimizer.betas={{_target_: {inner}, command: ls}}"]))
        with pytest.raises(UserError, match=f"^optimizer: .*{said}"):
            build_optimizer([("w", torch.nn.Parameter(torch.ones(2, 2)))], config.optimizer)


ADAM = ["data=text", "data.path=x", "data.seq_len=8", "optimizer=custom", "optimizer._target_=torch.optim.RAdam"]


def test_a_callback_of_functions_is_refused() -> None:
    entry = {
        "_target_": "lightning.pytorch.callbacks.LambdaCallback",
        "on_fit_start": {"_target_": "torch.nn.Identity"},
    }
    with pytest.raises(UserError, match="LambdaCallback can't be used here: it takes functions"):
        build_target(entry, "callbacks.extra", pl.Callback, refused=extra.REFUSED)


@pytest.mark.parametrize("source", ["torch.utils.cpp_extension.subprocess.Popen", "torch.nn.Linear",
                                    "transformers.utils.import_utils.subprocess.Popen"])  # fmt: skip
def test_a_source_is_a_class_of_an_opened_package_with_its_members(source: str, marker: Path) -> None:
    options = f"data.source_options={{args: 'touch {marker}; sleep 0', shell: true}}"
    words = ["data=text", f"data.source={source}", options]
    STARTED.clear()
    with pytest.raises(UserError, match=r"data\.source"):
        choose.open_own(rules.check(rules.compose(words)).data)
    assert STARTED == []
    with pytest.raises(UserError, match="it lacks label, settings, resolved, notes, pieces, text_bytes"):
        choose.open_own(rules.check(rules.compose([*words, "data.source=test_targets.NoCallback",
                                                "run.allow_target=[test_targets]"])).data)  # fmt: skip
    assert not marker.exists()
    assert RAN == []


def test_a_sources_arguments_go_by_the_same_rule() -> None:
    word = "data.source_options={number: 1, part: {_target_: subprocess.Popen, args: ls}}"
    words = ["data=text", "data.source=test_targets.Members", word, "run.allow_target=[test_targets]"]
    with pytest.raises(UserError, match=r"data\.source: _target_=subprocess\.Popen is outside"):
        choose.open_own(rules.check(rules.compose(words)).data)
    assert RAN == []


class Members:
    label: str
    settings, resolved, notes = {}, "1", []
    pieces = text_bytes = None

    def __init__(self, number: int, part: Any) -> None:
        RAN.append("Members")


# The test below draws any name in the known packages: the modules' own, imported ones, and attributes of both.
def _holders() -> list[str]:
    known = tuple(f"{name}." for name in targets.KNOWN)
    return sorted(name for name in sys.modules if f"{name}.".startswith(known))


def _unloaded() -> list[str]:
    """Returns the modules of the known packages by their files; most of them are never imported here."""
    found = []
    for package in targets.KNOWN:
        root = Path(next(iter(sys.modules[package].__path__)))
        for file in root.rglob("*.py"):
            found.append(".".join((package, *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"))
    return sorted(found)


@pytest.fixture(scope="module")
def names() -> tuple[list[str], list[str]]:
    import peft.optimizers
    import transformers.models.llama.modeling_llama

    assert transformers
    assert peft
    return _holders(), _unloaded()


KINDS = [pl.Callback, Metric, torch.optim.Optimizer, LRSchedule, Objective, PreTrainedModel]


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_no_name_of_the_known_packages_is_called_that_is_not_of_the_kind(
    names: tuple[list[str], list[str]], data: st.DataObject
) -> None:
    """Nothing of another kind is called, and only modules in targets.PLACES are imported on the way."""
    loaded, files = names
    module = data.draw(st.sampled_from(loaded) if data.draw(st.booleans()) else st.sampled_from(files))
    target, at = module, vars(sys.modules[module]) if module in sys.modules else {}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(map(str, at)) or ["main", "run", "Popen"]))
        target, found = f"{target}.{name}", at.get(name)
        at = vars(found) if isinstance(found, type | ModuleType) else {}
    kind = data.draw(st.sampled_from(KINDS))
    called: list[type] = []

    def importing(name: str) -> ModuleType:
        if name not in sys.modules:
            assert f"{name}.".startswith(tuple(f"{place}." for place in targets.PLACES)), name
            assert not any(part.startswith(("_", "convert_", "test")) for part in name.split(".")), name
            raise ImportError(name)
        return sys.modules[name]

    def making(node: Any, key: str) -> object:
        called.append(node.cls)
        return node

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets.importlib, "import_module", importing)
        patch.setattr(targets, "_made", making)  # the only function that calls a class
        for entry in ({"_target_": target}, {"_target_": TIMER, "duration": [{"_target_": target}]}):
            with contextlib.suppress(UserError):
                build_target(entry, "callbacks.extra", kind)
    for cls in called:
        assert issubclass(cls, kind)
        assert f"{cls.__module__}.".startswith(tuple(f"{place}." for place in targets.PLACES))


# Functions that get a class or a module by a name that is not written in the source itself.
BY_NAME = {"import_module", "__import__", "instantiate", "get_class", "get_object", "get_method",
           "import_string", "resolve_name", "run_module", "run_path", "exec_module", "eval", "exec"}  # fmt: skip
ELSEWHERE = {
    "config/targets.py": {"import_module"},  # the builder
    "cli.py": {"import_module"},  # the action of a verb, as its file names it, and lmtrain.<verb>, one of VERBS
    # In the sandbox of reward=code, an answer, its tests and the modules that they import; in a process for it, a tool.
    "rewards/code_names.py": {"import_module", "exec"},
    "rewards/code_process.py": {"exec"},
    "rewards/code_values.py": {"import_module"},
    "rewards/own_process.py": {"import_module"},
}


def test_nothing_but_the_builder_imports_or_builds_by_name() -> None:
    source, found = REPO / "src" / "lmtrain", dict[str, set[str]]()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                of_model = name == "eval" and isinstance(node.func, ast.Attribute)  # nn.Module.eval()
                if name in BY_NAME and not of_model:
                    found.setdefault(str(file.relative_to(source)), set()).add(name)
    assert found == ELSEWHERE
