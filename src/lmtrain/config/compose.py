"""Composes, checks, saves and loads the config. Imports neither torch nor lightning."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain import secrets
from lmtrain.config import environment, explain, interpolations, proposers, safe_yaml, sections, trust
from lmtrain.config.batch import batch_split
from lmtrain.config.checks import check_pretrained_name, check_values
from lmtrain.config.config_files import ConfigFile, composed_files, folders_of, hydra_over, origins
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.keys import at, flat
from lmtrain.config.options import MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES
from lmtrain.config.override_text import Command
from lmtrain.config.overrides import Word, parse, parse_all
from lmtrain.config.proposers import Proposal, WordFacts
from lmtrain.config.schema import Config
from lmtrain.errors import UserError, naming


@dataclasses.dataclass(frozen=True)
class Composition:
    """A composed config, and what it was made of."""

    tree: DictConfig
    words: list[str]  # all overrides in Hydra's grammar, those proposed by lmtrain first
    proposals: list[Proposal]

    @property
    def reasons(self) -> list[str]:
        """The reasons of the proposals that the plan says."""
        return [proposal.reason for proposal in self.proposals if proposal.reason and proposal.in_plan]


def compose(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str = "config", **options: Any
) -> DictConfig:
    """Returns the composed config, the tree of `composition`, which takes the same arguments."""
    return composition(overrides, config_dir, config_name, **options).tree


def composition(
    overrides: Sequence[str],
    config_dir: str | None = None,
    config_name: str = "config",
    *,
    for_sweep: bool = False,
    foreign: trust.Foreign | None = None,
) -> Composition:
    """Composes the config for these overrides; a wrong one raises UserError naming the nearest valid key or option.

    The words are parsed, proposers (proposers.py) add to them, Hydra composes proposals and words, and what follows
    from the composed values is set.

    Args:
        for_sweep: whether the config includes Hydra's own node, and keys that only a sweep reads are accepted.
        foreign: the file that gives those overrides that the user has not typed; None: all are typed (or see JUDGED).
    """
    folders, search = folders_of(config_dir, config_name)
    hydra = _Hydra(folders, search, config_dir, config_name, for_sweep)
    words = explain.with_plain_groups(parse_all(overrides), folders)
    explain.check_words(words, for_sweep)

    def judged(some: Sequence[Word]) -> DictConfig:
        tree = hydra.compose(some)
        _judge(tree, some, hydra, foreign)
        return tree

    facts = WordFacts(words, folders, judged)
    proposers.propose(facts)
    used = facts.used()
    composed = judged(used)
    _check_model_name(facts.typed, composed, used, hydra)
    _refuse_removals(composed, used)
    _leave_to_replaced(composed, facts.typed)
    _complete_own_optimizer(composed)
    for key in sections.GONE.keys() & facts.typed.keys():
        own = key.startswith("optimizer.") and "_target_" in composed.optimizer
        if not own and key not in sections.names_of(sections.classes(composed)):
            raise UserError(explain.unknown_key(key, ()))
    for proposal in proposers.row_length(facts.typed, composed, is_named="model" in facts.replaced()):
        word = parse(proposal.override)
        OmegaConf.update(composed, word.key, word.value)
        facts.proposals.append(proposal)
    return Composition(composed, [word.text for word in used], facts.proposals)


@dataclasses.dataclass(frozen=True)
class _Hydra:
    """Hydra over the folders of configs."""

    folders: list[Path]
    search: list[str]
    config_dir: str | None
    config_name: str
    for_sweep: bool

    def compose(self, words: Sequence[Word]) -> DictConfig:
        """Composes the config; an error of Hydra's or OmegaConf's becomes a UserError that names the wrong word."""

        def again(some: Sequence[Word]) -> DictConfig:
            overrides = [*self.search, *(word.text for word in some)]
            return hydra_compose(self.config_name, overrides, return_hydra_config=self.for_sweep)

        with hydra_over(self.folders):
            try:
                composed = again(words)
            except MissingConfigException as error:
                raise UserError(explain.missing_config(error, self.folders, words)) from None
            # Raised by invalid files in a user's folder, such as a run folder.
            except (yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError) as error:
                raise UserError(f"a config can't be read: {' '.join(str(error).split())}") from None
            # Hydra raises ValueError if a group is set to a number or null.
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                raise UserError(explain.refused(error, self.folders, words, again)) from None
        self._keep_texts(composed, words)
        return composed

    def files(self, words: Sequence[Word]) -> list[ConfigFile]:
        """Returns the files that are composed for these words, in order of increasing precedence."""
        return composed_files([word.text for word in words], self.config_dir, self.config_name)

    def _keep_texts(self, composed: DictConfig, words: Sequence[Word]) -> None:
        """Gives keys whose type is text what a file has for them, where YAML has a number or boolean (1.10, no)."""
        plain = OmegaConf.to_container(composed, resolve=False)
        found = {key: dict(flat(at(plain, key.split(".")))) for key in sections.text_keys()}
        wrong = [key for key, values in found.items() if any(isinstance(v, int | float) for v in values.values())]
        for file in reversed(self.files(words)) if wrong else ():
            tree = safe_yaml.parse(safe_yaml.text_of(file.path), str(file.path), file.package)
            for key in [key for key in wrong if at(tree, file.way_to(key) or [""]) is not None]:
                OmegaConf.update(composed, key, at(tree, file.way_to(key)), merge=False)
                wrong.remove(key)


def _judge(composed: DictConfig, words: Sequence[Word], hydra: _Hydra, foreign: trust.Foreign | None) -> None:
    """Raises UserError for what somebody else's file may not set, and for interpolations that can't be resolved."""
    ours = OmegaConf.masked_copy(composed, [str(k) for k in composed if k != "hydra"]) if hydra.for_sweep else composed
    plain = interpolations.resolved(ours)
    theirs = None if foreign is None or environment.is_trusted(foreign.file) else foreign
    if foreign is trust.JUDGED or (theirs is None and hydra.config_dir is None):
        return
    typed, where = [word.text for word in words], Path(str(hydra.config_dir))
    if theirs is not None:
        typed, where = _with_models_named(theirs.typed, hydra.folders), theirs.file
    trust.refuse(ours, plain, typed, where, functools.cache(lambda: hydra.files(words)))


def _with_models_named(typed: Sequence[str], folders: list[Path]) -> list[str]:
    words = parse_all(typed)
    named = proposers.named_model(WordFacts(words, folders, lambda _: DictConfig({})))
    return [*(p.override for p in named), *(w.text for w in words if not named or w.key != "model")]


def _refuse_removals(composed: DictConfig, words: Sequence[Word]) -> None:
    """Raises UserError for ~key of a key that every config has; arguments of a user's own class can be left out."""
    for word in (word for word in words if word.override.is_delete()):
        if "_target_" not in (composed.get(word.key.partition(".")[0]) or ()):
            explain.refuse_removal(word.key, sections.all_keys())


def _check_model_name(typed: Mapping[str, Any], composed: DictConfig, words: Sequence[Word], hydra: _Hydra) -> None:
    """Raises UserError if a typed model.name is not that of the chosen model, unless the model is a custom class.

    The name is only displayed, so setting it usually means that an option of `model` or a hub model was intended.
    """
    if "model.name" not in typed or "_target_" in composed.model:
        return
    name, places = str(typed["model.name"]), origins("model.name", hydra.files(words), [])
    usual = places[-1].text if places else None
    if name == usual:
        return
    is_option = name in options_of("model", hydra.folders)
    instead = f"Choose model={name}" if is_option else explain.unknown_option("model", name, hydra.folders)
    raise UserError(f"model.name={name} changes only what is shown: the model stays {usual}. {instead}")


def _leave_to_replaced(composed: DictConfig, typed: Mapping[str, Any]) -> None:
    """Deletes keys that an experiment set for an option of model, objective, ... that a typed option has replaced."""
    objectives = {name: options for name, (_, options) in OBJECTIVES.items()}
    groups: dict[str, tuple[str, dict[str, type[Any]]]] = {
        "model": ("init", MODELS), "objective": ("name", objectives), "optimizer": ("name", OPTIMIZERS),
        "schedule": ("name", SCHEDULES),
    }  # fmt: skip
    for group, (which, own) in groups.items():
        name = composed[group].get(which)
        if group not in typed or name not in own or (group != "objective" and "_target_" in composed[group]):
            continue
        takes = {field.name for field in dataclasses.fields(own[name])}
        of_others = {field.name for other in own.values() for field in dataclasses.fields(other)} - takes
        kept = [key for key in composed[group] if key not in of_others or f"{group}.{key}" in typed]
        composed[group] = OmegaConf.masked_copy(composed[group], kept)


def _complete_own_optimizer(composed: DictConfig) -> None:
    """Adds the keys of every optimizer to a user's config that contains only a class and its arguments."""
    if composed.optimizer.get("_target_") is not None:
        base = OmegaConf.load(conf_dir() / "optimizer" / "base.yaml")
        composed.optimizer = OmegaConf.merge(base, {"name": "custom"}, composed.optimizer)


def to_yaml(composed: DictConfig, package: str | None = None) -> str:
    """Returns the composed config as YAML with interpolations resolved, except those that read the environment.

    package: the only section to return, headed as by Hydra's --package; UserError if it is none.
    """
    kept = environment.note(composed)
    tree = environment.unresolved(OmegaConf.to_container(composed, resolve=True), kept, environment.as_written)
    whole = package in (None, "_global_")
    section = tree if whole else at(tree, str(package).split("."))
    if not isinstance(section, dict):
        raise UserError(f"--package {package}: choose {', '.join(k for k in tree if isinstance(tree[k], dict))}")
    text = OmegaConf.to_yaml(OmegaConf.create(section))
    text = safe_yaml.dumped(section) if "\x85" in text else text  # OmegaConf leaves a NEL, which ends a line, as it is
    return text if whole else f"# @package {package}\n{text}"


def check(composed: DictConfig | Mapping[str, Any], command: Command = Config.command) -> Config:
    """Returns the typed config after all checks; raises UserError naming the wrong key and a valid value.

    Args:
        composed: the result of `compose`, or plain values, in which interpolations are not resolved.
        command: what it was composed from.
    """
    # Interpolations are resolved only once; `${` in the resulting texts is escaped.
    plain, kept = composed, dict[str, environment.Reading]()
    if isinstance(composed, DictConfig):
        plain, kept = interpolations.resolved(composed), environment.note(composed)
    unset = next((key for key, value in flat(plain) if value == "???"), None)  # Hydra's sign for a mandatory value
    if unset is not None:
        raise UserError(f"{unset} has no value: set {unset}=...")
    # Before data.seq_len, for which such a model has no default.
    check_pretrained_name(*(at(plain, ("model", key)) for key in ("init", "name_or_path")))
    try:
        config = sections.typed(Config, plain, sections.classes(plain))
    except (KeyError, OverflowError, TypeError, UserError):
        config = _converted(plain)
    vars(config)["kept"] = environment.typed(kept, dataclasses.asdict(config)) if kept else {}
    vars(config)["command"] = command
    check_values(config)
    data = config.data
    if data.rows == "text" and data.packing == "concat":
        data.packing = None  # the default, which means concat for text
    if data.ring_bytes is None:  # no stream: checkpoints are not compared by its keys
        data.ring_shard_tokens = data.ring_window = data.ring_val_tokens = data.ring_patience = None
    apply_fast_dev_run(config)
    batch_split(data.global_batch_size, data.micro_batch_size, parts=1)
    return config


def _converted(plain: Mapping[str, Any]) -> Config:
    """Returns plain values as the config, converted to the types of their keys; raises UserError if one can't be."""
    tree: Any = OmegaConf.create(interpolations.escaped(plain))
    found = sections.classes(tree)
    for key in sections.GONE.keys() - set(sections.names_of(found)):
        section, _, name = key.rpartition(".")
        holder = OmegaConf.select(tree, section)
        if isinstance(holder, DictConfig):
            holder.pop(name, None)
    try:
        schema = OmegaConf.structured(Config)
        for section, options in found.items():
            schema[section] = OmegaConf.structured(options)
        missing = {key.split(".")[0] for key in OmegaConf.missing_keys(OmegaConf.merge(schema, tree))}
        config: Any = OmegaConf.to_object(OmegaConf.merge(schema, _defaults_of(missing), tree))
        return config
    except OmegaConfBaseException as error:
        raise UserError(explain.wrong_type(error, tree, sections.names_of(found))) from None


def _defaults_of(groups: set[str]) -> dict[str, Any]:
    """Returns the defaults of these groups in conf/, for keys that the config.yaml of an earlier version lacks."""
    files = {group: conf_dir() / group / "default.yaml" for group in groups}
    return {g: yaml.safe_load(f.read_text(encoding="utf-8")) for g, f in files.items() if f.is_file()}


def apply_fast_dev_run(config: Config) -> None:
    """Sets the keys that implement trainer.fast_dev_run, which is true (one step) or a number of steps."""
    steps = int(config.trainer.fast_dev_run)
    if steps < 1:
        return
    t = config.trainer
    t.max_steps = t.limit_val_batches = t.val_check_interval = steps
    t.max_epochs, t.log_every_n_steps = None, 1
    config.logger, config.export.enabled, config.callbacks.samples.every_n_validations = {}, False, 0


def to_plain(config: Config, show: Callable[[str], str] = secrets.shown) -> dict[str, Any]:
    """Returns the config as plain containers, without optional fields that are None.

    Values from the environment stay unresolved; `show` is applied to every other text and by default hides secrets.
    """
    plain = dataclasses.asdict(config)
    for section in ("objective", "model", "data", "tokenizer", "peft", "memory", "optimizer", "schedule"):
        optional = {f.name for f in dataclasses.fields(getattr(config, section)) if f.default is None}
        plain[section] = {k: v for k, v in plain[section].items() if v is not None or k not in optional}
    return environment.unresolved(plain, config.kept, show)


def dump(config: Config) -> str:
    """Returns the text of config.yaml: plain YAML that can be run again with `--config-dir <run> run.dir=<another>`."""
    return safe_yaml.dumped(to_plain(config, environment.as_written))


def read(path: Path) -> dict[str, Any]:
    """Reads a run's config.yaml as plain values; interpolations that read the environment are kept as text."""
    text = safe_yaml.text_of(path)
    tree = safe_yaml.parse(text, str(path))
    with contextlib.suppress(KeyError, TypeError):  # OmegaConf says what is wrong with other values
        if "${" not in str(tree):
            return sections.typed(dict[str, Any], tree)
    with naming(str(path)):
        return interpolations.resolved(environment.as_text(undumped(text, str(path))))


def undumped(text: str, where: str) -> DictConfig:
    """Parses text written by `dump`, without checking the config; raises UserError prefixed with `where`."""
    tree = safe_yaml.parse(text, where)
    if not isinstance(tree, dict):
        raise UserError(f"{where} can't be read: it holds no keys")
    try:
        return OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        raise UserError(f"{where} can't be read: {' '.join(str(error).split())}") from None


def load(path: Path, grants: trust.Grants, *, own: bool = False, command: Command = Config.command) -> Config:
    """Loads and checks the config a run was started with.

    Args:
        grants: what the user has granted (trust.py); the file itself grants nothing.
        own: whether this process or its parent wrote the file, so that the user has asked for what it reads.
        command: what it was composed from.

    Raises:
        UserError: the file can't be read, is invalid, or needs more than `grants`.
    """
    tree = undumped(safe_yaml.text_of(path), str(path))
    if not own:
        tree = environment.without_reading(tree, path)
    trust.refuse_code(tree, grants, path)
    with naming(str(path)):
        return check(tree, command)
