"""`_target_` wherever an attacker's YAML can write it: what runs, writes or loads; nested, partial and disguised."""

from collections.abc import Iterator
from typing import Any

import yaml
from cases import Case, Place

SH = ["/bin/sh", "-c", "touch {marker}"]
CODE = "open('{marker}', 'w')"
SOURCE = "{stranger}/pwned_script.py"

# Calls that run, load, write or remove something. Those in well-known packages are the more dangerous ones.
CALLS: list[dict[str, Any]] = [
    {"_target_": "os.system", "command": "touch {marker}"},
    {"_target_": "posix.system", "_args_": ["touch {marker}"]},
    {"_target_": "subprocess.Popen", "args": SH},
    {"_target_": "subprocess.check_output", "_args_": [SH]},
    {"_target_": "builtins.eval", "_args_": [CODE]},
    {"_target_": "builtins.exec", "_args_": [CODE]},
    {"_target_": "builtins.open", "file": "{marker}", "mode": "w"},
    {"_target_": "runpy.run_path", "path_name": SOURCE},
    {"_target_": "shutil.rmtree", "path": "{area}/home"},
    {"_target_": "shutil.copyfile", "src": "{key}", "dst": "{marker}"},
    {"_target_": "pathlib.Path.touch", "_args_": ["{marker}"]},
    {"_target_": "pickle.loads", "_args_": ["cposix\nsystem\n(Vtouch {marker}\ntR."]},
    {"_target_": "timeit.timeit", "stmt": CODE, "number": 1},
    {"_target_": "setuptools._distutils.spawn.spawn", "cmd": SH},
    {"_target_": "torch.utils.collect_env.run", "command": SH},
    {"_target_": "torch.utils.collect_env.run_and_read_all", "run_lambda": None, "command": "touch {marker}"},
    {"_target_": "torch.utils.cpp_extension.subprocess.Popen", "args": SH},
    {"_target_": "torch.utils.cpp_extension.shutil.copyfile", "src": "{key}", "dst": "{marker}"},
    {"_target_": "torch.utils.cpp_extension.os.system", "command": "touch {marker}"},
    {"_target_": "torch.utils.cpp_extension.load_inline", "name": "pwned", "cpp_sources": "int PWNED;"},
    {"_target_": "torch.hub.load", "repo_or_dir": "{stranger}", "model": "model", "source": "local"},
    {"_target_": "torch.hub.load_state_dict_from_url", "url": "http://127.0.0.1:9/PWNED"},
    {"_target_": "torch.hub.download_url_to_file", "url": "http://127.0.0.1:9/a", "dst": "{marker}"},
    {"_target_": "torch.load", "f": "{stranger}/pwned.pt", "weights_only": False},
    {"_target_": "torch.save", "obj": [1], "f": "{marker}"},
    {"_target_": "torch.package.PackageImporter", "file_or_buffer": "{stranger}/pwned.pt"},
    {"_target_": "torch.ops.load_library", "path": "{stranger}/pwned.so"},
    {"_target_": "torch.distributed.run.main", "args": ["--nproc-per-node=1", SOURCE]},
    {"_target_": "torch.distributed.TCPStore", "host_name": "127.0.0.1", "port": 0, "is_master": True},
    {
        "_target_": "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        "entrypoint": "/bin/sh",
        "args": SH[1:],
        "env": {},
        "stdout": None,
        "stderr": None,
        "local_rank_id": 0,
    },
    {"_target_": "torch.utils.tensorboard.SummaryWriter", "log_dir": "{marker}"},
    {"_target_": "torch.utils.data.DataLoader", "dataset": [1], "num_workers": 2},
    {"_target_": "torch.jit.load", "f": "{stranger}/pwned.pt"},
    {"_target_": "torch._dynamo.utils.subprocess.run", "args": SH},
    {"_target_": "torch.fx.GraphModule", "root": {}, "graph": CODE},
    {"_target_": "transformers.utils.import_utils.subprocess.Popen", "args": SH},
    {"_target_": "transformers.utils.import_utils.importlib.import_module", "name": "pwned_script"},
    {
        "_target_": "transformers.dynamic_module_utils.get_class_from_dynamic_module",
        "class_reference": "pwned_script.Model",
        "pretrained_model_name_or_path": "{stranger}",
    },
    {
        "_target_": "transformers.AutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "{stranger}",
        "trust_remote_code": True,
    },
    {"_target_": "transformers.pipeline", "model": "{stranger}", "trust_remote_code": True},
    {"_target_": "transformers.Trainer", "model": None, "args": {"output_dir": "{marker}"}},
    {"_target_": "lightning.fabric.utilities.cloud_io._load", "path_or_url": "{stranger}/pwned.pt"},
    {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "{marker}"},
    {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": "{marker}"},
    {"_target_": "lightning.pytorch.Trainer", "default_root_dir": "{marker}"},
    {"_target_": "lightning.pytorch.cli.LightningCLI", "args": ["--help"]},
    {"_target_": "lightning.pytorch.profilers.SimpleProfiler", "dirpath": "{marker}", "filename": "a"},
    {"_target_": "lightning.pytorch.LightningModule.load_from_checkpoint", "checkpoint_path": "{stranger}/pwned.pt"},
    {"_target_": "torchmetrics.text.InfoLM", "model_name_or_path": "{stranger}"},
    {"_target_": "torchmetrics.utilities.imports.package_available", "_args_": ["pwned_script"]},
    {"_target_": "peft.PeftModel.from_pretrained", "model": None, "model_id": "{stranger}"},
    {"_target_": "lmtrain.files.write_atomic", "path": "{marker}", "text": "a"},
    {
        "_target_": "lmtrain.config.targets.build_target",
        "entry": {"_target_": "os.system", "command": "touch {marker}"},
    },
    {"_target_": "lmtrain.cli.importlib.import_module", "name": "pwned_script"},
    {"_target_": "lmtrain.train.main", "argv": ["run.dir={marker}"]},
    {"_target_": "pwned_script.Model"},
    {"_target_": "stranger.pwned_script.Model"},
    {"_target_": "hydra.utils.instantiate", "config": {"_target_": "os.system", "command": "touch {marker}"}},
    {"_target_": "hydra.utils.get_method", "path": "os.system"},
    {"_target_": "omegaconf.OmegaConf.register_new_resolver", "name": "a", "resolver": "eval"},
    {"_target_": "logging.FileHandler", "filename": "{marker}"},
    {"_target_": "multiprocessing.util.spawnv_passfds", "path": "/bin/sh", "args": SH, "passfds": []},
    {"_target_": "ctypes.CDLL", "name": "{stranger}/pwned.so"},
    {"_target_": "numpy.load", "file": "{stranger}/pwned.pt", "allow_pickle": True},
    {"_target_": "numpy.f2py.subprocess.run", "args": SH},
]
TIMER, LAMBDA = "lightning.pytorch.callbacks.Timer", "lightning.pytorch.callbacks.LambdaCallback"


def payloads(place: Place) -> None:
    """Writes what those calls would load: a script, a pickle, a torch.hub folder."""
    touch = f"open({str(place.marker)!r}, 'w')\n"
    for name in ("pwned_script.py", "hubconf.py", "__init__.py"):
        place.text(name, f"{touch}class Model: pass\ndef model(): pass\n")
    place.text("pwned.pt", f"cposix\nsystem\n(Vtouch {place.marker}\ntR.".encode())
    place.text("pwned.so", b"\x7fELF")


def experiment(place: Place, tree: Any, *words: str, verb: str = "train", data: bool = True) -> list[str]:
    """Returns the command with an attacker's experiment, whose folder is --config-dir."""
    payloads(place)
    text = tree if isinstance(tree, str) else place.yaml("scratch.yaml", tree).read_text()
    place.yaml("experiment/theirs.yaml", f"# @package _global_\n{place.filled(text)}")
    command = place.train("--config-dir", str(place.stranger), "experiment=theirs", *words, data=data)
    return [verb, *[w for w in command[1:] if verb == "train" or not w.startswith("run.name")]]


def as_root(place: Place, tree: dict[str, Any], *words: str) -> list[str]:
    """Returns the command with an attacker's whole config, as in a run's folder; it composes in half the time."""
    payloads(place)
    whole = yaml.safe_load((place.trained / "config.yaml").read_text())
    whole["run"] |= {"name": None, "dir": None, "root": "outputs"}
    place.yaml("config.yaml", _merged(whole, tree))
    return [
        "train",
        "--config-dir",
        str(place.stranger),
        "run.name=mine",
        f"data.cache_dir={place.area / 'cache'}",
        *words,
    ]


def _merged(whole: Any, tree: Any) -> Any:
    if not isinstance(whole, dict) or not isinstance(tree, dict):
        return tree
    return {**whole, **{k: _merged(whole.get(k), v) for k, v in tree.items()}}


def of(kind: str, name: str, tree: Any, *says: str, must: str | None = "refused", **options: Any) -> Case:
    """Returns a case with the attacker's tree as an experiment."""
    return Case(kind, name, lambda place: experiment(place, tree, **options), says, must)


def root(kind: str, name: str, tree: dict[str, Any], *says: str, must: str | None = "refused") -> Case:
    """Returns a case with the attacker's tree merged into a whole config."""
    return Case(kind, name, lambda place: as_root(place, tree), says, must)


def _short(call: dict[str, Any]) -> str:
    return str(call["_target_"])


def cases() -> Iterator[Case]:
    for i, call in enumerate(CALLS):
        yield (root, root, of)[i % 3](
            "target as a callback", _short(call), {"callbacks": {"extra": [call]}}, "callbacks.extra"
        )
    for call in CALLS[14:60:3]:
        yield root(
            "target as an argument",
            _short(call),
            {"callbacks": {"extra": [{"_target_": TIMER, "duration": {"a": [call]}}]}},
            "callbacks.extra",
        )
        yield root(
            "target as a positional argument",
            _short(call),
            {"callbacks": {"extra": [{"_target_": TIMER, "_args_": [call]}]}},
            "callbacks.extra",
        )
    for call in CALLS[::9]:
        for key in ("optimizer", "schedule", "objective"):
            tree = {key: {**call, "name": "a"}}
            yield of(f"target as {key}", _short(call), tree, key)
        arguments = {k: v for k, v in call.items() if k != "_target_"}
        tree = {"data": {"source": call["_target_"], "source_options": arguments}}
        yield root("target as data.source", _short(call), tree, "data.")
        metric = {"samples": {"metrics": [call]}}
        yield root("target as a metric", _short(call), {"callbacks": metric}, "callbacks.samples.metrics")
    yield from disguised()
    yield from _elsewhere()


def _elsewhere() -> Iterator[Case]:
    """Yields other keys and sections that can name code."""
    for name in ("subprocess.Popen", "torch.utils.collect_env.subprocess.Popen", "pwned_script.Model"):
        yield of("target as data.rows", name, {"data": {"rows": name}}, "data.")
        yield of("target as model", name, {"model": {"_target_": name}}, "model")
        yield of("target in logger", name, {"logger": {"csv": {"_target_": name, "args": SH}}}, "logger")
    nested = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "foreach": CALLS[14]}}
    yield of("target as an argument", "of an optimizer", nested, "optimizer")
    nested = {"schedule": {"name": "cosine", "min_lr_ratio": CALLS[14]}}
    yield of("target as an argument", "of a schedule", nested, "schedule")
    yield of("target as an argument", "of a trainer", {"trainer": {"profiler": CALLS[14]}}, "trainer.profiler")
    yield root("target as an argument", "of a seed", {"seed": CALLS[14]}, "seed")
    yield of("target as an argument", "of samples", {"callbacks": {"samples": CALLS[14]}}, "callbacks.samples")
    yield of("target as an argument", "of evaluate", {"evaluate": {"metrics": [CALLS[14]]}}, must=None)


def disguised() -> Iterator[Case]:
    """Yields targets with Hydra's own keys beside them, unusual spellings of names, and interpolated names."""
    run = CALLS[14]
    for words in ({"_partial_": True}, {"_recursive_": False}, {"_convert_": "all"}, {"_mode_": "call"}):
        entry = {**run, **words}
        yield root(
            "disguised target", f"with {next(iter(words))}", {"callbacks": {"extra": [entry]}}, "callbacks.extra"
        )
        inside = {"callbacks": {"extra": [{"_target_": TIMER, "duration": entry}]}}
        yield root("disguised target", f"inside, with {next(iter(words))}", inside, "callbacks.extra")
    for name in (
        "torch.utils.collect_env. run",
        " torch.utils.collect_env.run",
        "torch..utils.collect_env.run",
        "torch.utils.collect_env.run.__call__",
        "torch.__builtins__.eval",
        "torch.sys.modules",
        "torch.os.system",
        "lightning.pytorch.callbacks.Timer.__init__.__globals__",
        "torch.nn.Module.__subclasses__",
        "lightning.pytorch.callbacks.timer.__builtins__",
        "lmtrain",
        "",
        "torch.",
        ".torch",
        "torch.nn",
        "torch.optim.SGD\n",
        "ｔorch.os.system",
        "torch.ﬁ",
        17,
        ["os.system"],
        True,
        "lightning.pytorch.callbacks.Timer.__class__",
        "torch.classes.pwned",
        "type",
        "torch.nn.Module.__class__",
    ):
        yield root("disguised target", repr(name), {"callbacks": {"extra": [{"_target_": name}]}}, "callbacks.extra")
    hook = {"_target_": LAMBDA, "on_fit_start": run}
    yield root("disguised target", "a hook of LambdaCallback", {"callbacks": {"extra": [hook]}}, "callbacks.extra")
    hook = {"_target_": LAMBDA, "on_fit_start": "torch.utils.collect_env.run"}
    yield root("disguised target", "text for a hook", {"callbacks": {"extra": [hook]}}, must=None)
    tree = {"seed": 1, "callbacks": {"extra": [{"_target_": "torch.utils.collect_env.r${.un}", "un": "un"}]}}
    yield root("disguised target", "a name put together", tree, "callbacks.extra")
    tree = {"callbacks": {"extra": [{"_target_": "${run.name}", "command": SH}]}}
    yield root("disguised target", "a name from elsewhere", tree, "callbacks.extra")
    cycle = {"callbacks": {"extra": "${callbacks.extra}"}}
    yield root("disguised target", "a list of itself", cycle)
    deep: Any = run
    for _ in range(60):
        deep = {"_target_": TIMER, "duration": deep}
    yield root("disguised target", "sixty deep", {"callbacks": {"extra": [deep]}}, "callbacks.extra")
