"""The typed config: every key a user can set, with its type, constraints and what it affects. Defaults are in conf/.

    seq_len: Annotated[int, TRAJECTORY, at_least(1)]

What a key affects (constraints.py) decides what happens when it is changed: another folder of prepared data, a refusal
to resume, a note, or nothing. A field without a default must be in the YAML; one that defaults to None may be absent
from a YAML for which it has no meaning (AdamW has no `momentum`), and setting it there is refused. `Any` marks types
that OmegaConf can't express. Rules between fields are in checks.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from lmtrain.config.constraints import *  # the vocabulary of declarations
from lmtrain.config.free_sections import LOGGERS, METRICS, MODEL_FIELDS, REWARDS
from lmtrain.config.override_text import Command
from lmtrain.config.schema_data import DataConfig, InspectConfig, PrepareConfig, TokenizerConfig

FP8 = "fp8"
PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", FP8)
STRATEGIES = ("auto", "ddp", "fsdp", "fsdp_tp", "deepspeed", "ddp_find_unused_parameters_true")
_FROM_SCRATCH = ReadWhere(lambda c: c.model.init == "scratch", "a pretrained model keeps the size of its embedding")


@dataclass(kw_only=True)
class RunConfig:
    name: Annotated[str | None, SHOWN, OPEN, name_of_folder]
    dir: Annotated[str | None, SHOWN, NEW_FOLDER]  # resolved to an absolute path before anything is written
    root: Annotated[str, SHOWN, NEW_FOLDER]
    resume: Annotated[str | None, SHOWN, SOURCE]  # none, auto or a checkpoint; None: auto for a named run, else none
    # A checkpoint at the full learning rate, from which the decay starts
    cooldown_from: Annotated[str | None, SHOWN, SOURCE]
    allow_change: Annotated[list[str], SHOWN]  # fingerprint entries that may differ on resume
    schedule_on_resume: Annotated[str, RATE, choice("keep", "rescale")]
    quiet: Annotated[bool, SHOWN]
    time_limit: Annotated[str | None, SHOWN, OPEN]  # HH:MM:SS, measured from the start of the process
    # Packages, besides the known ones, whose classes `_target_` may name
    allow_target: Annotated[list[str], SHOWN, CODE]


@dataclass(kw_only=True)
class ObjectiveConfig:
    """The keys of every objective. Subclasses add options: those in options.py, or `Options` of a user's class."""

    rows: ClassVar[str] = "text"  # the data it needs: text, or a row format, for all that hold the same
    headline: ClassVar[tuple[str, ...]] = ("loss",)  # the means shown first, the most important one at the beginning
    scalar_head: ClassVar[bool] = False  # whether the model outputs one scalar per row instead of next-token logits
    may_stay_in_files: ClassVar[bool] = False  # whether pretrained weights may, as nothing reads them before sharding
    trains_on_rollouts: ClassVar[bool] = False  # on groups of its own completions, which `Objective.rollout` holds
    name: Annotated[str, TRAJECTORY, OPEN]
    _target_: Annotated[str, TRAJECTORY, classes("lmtrain.objectives")]

    def check(self, config: "Config") -> None:
        """Raises UserError for incompatible keys; called after each key has passed its own constraints."""

    def row_tokens(self, data: DataConfig, model: Any) -> int:
        """Returns the maximum number of tokens that `model` reads in training for a row of the data."""
        return data.seq_len

    def reference_in_use(self) -> str:
        return "none"  # or another of options.REFERENCES; lmtrain.estimate adds the memory of a copy

    def other_models(self, config: "Config") -> "Sequence[ModelConfig]":
        """Returns the models that every device holds whole beside the trained one, in fp32."""
        return []

    def why_on_every_rank(self) -> str | None:
        """Returns why every rank has to build the whole model; None if it is enough that rank 0 does."""
        return None


@dataclass(kw_only=True)
class ModelConfig:
    """The keys of every model. options.py adds those of models from scratch, pretrained models and custom classes."""

    name: Annotated[str, SHOWN, OPEN]
    init: Annotated[str, MODEL, choice("scratch", "pretrained")]
    trust_remote_code: Annotated[bool, MODEL, CODE]
    attention: Annotated[str, MACHINE, OPEN]
    learning_rate: Annotated[float, RATE]
    vocab_size: Annotated[int | None, MODEL]
    vocab_multiple_of: Annotated[int, MODEL, at_least(1), _FROM_SCRATCH]
    dropout: Annotated[float, TRAJECTORY, share]
    max_position_embeddings: Annotated[int | None, MODEL] = None
    extra: Annotated[dict[str, Any], MODEL, MODEL_FIELDS] = field(default_factory=dict)


_IN_4_BITS = ReadWhere(lambda c: c.peft.quantization in ("nf4", "fp4"), "set peft.quantization=nf4 too")


@dataclass(kw_only=True)
class PeftConfig:
    method: Annotated[str, MODEL, choice("none", "lora", "memory")]
    adapter: Annotated[str | None, MODEL, SOURCE, CONTENT] = None  # folder or hub name of an adapter to train further
    r: Annotated[int | None, MODEL, at_least(1)] = None
    alpha: Annotated[float | None, MODEL, at_least(1)] = None
    dropout: Annotated[float | None, TRAJECTORY, share] = None
    target_modules: Annotated[Any, MODEL, OPEN] = None  # all-linear, a regular expression, or a list of names
    modules_to_save: Annotated[list[str] | None, MODEL, OPEN] = None
    bias: Annotated[str | None, MODEL, choice("none", "all", "lora_only")] = None
    use_rslora: Annotated[bool | None, MODEL] = None
    use_dora: Annotated[bool | None, MODEL] = None
    init_weights: Annotated[str | None, MODEL, OPEN] = None  # default, pissa, pissa_niter_<n>, ...
    quantization: Annotated[str | None, MODEL, choice("nf4", "fp4", "int8")] = None  # how the frozen base is stored
    double_quant: Annotated[bool | None, MODEL, _IN_4_BITS] = None
    learning_rate: Annotated[float | None, RATE] = None


@dataclass(kw_only=True)
class MemoryConfig:
    num_chapters: Annotated[int | None, MODEL, at_least(1)] = None  # None: no memory
    chapter_size: Annotated[int | None, MODEL, at_least(1)] = None
    memory_dim: Annotated[int | None, MODEL, at_least(1)] = None
    num_heads: Annotated[int | None, MODEL, at_least(1)] = None
    top_k: Annotated[int | None, MODEL, at_least(1)] = None
    layers: Annotated[Any, MODEL, OPEN] = None  # every_<n>, or a list of numbers counted from 0
    router: Annotated[str | None, MODEL, choice("top_k", "straight_through", "soft")] = None
    router_noise: Annotated[float | None, TRAJECTORY, not_negative] = None
    share_bank: Annotated[bool | None, MODEL] = None


@dataclass(kw_only=True)
class RouterConfig:
    """Auxiliary losses of routers, of a memory or a mixture of experts."""

    load_balance: Annotated[float | None, TRAJECTORY, not_negative]  # None: the mixture's router_aux_loss_coef
    deviation: Annotated[float, TRAJECTORY, not_negative]
    z_loss: Annotated[float, TRAJECTORY, not_negative]
    over_layers: Annotated[str, TRAJECTORY, choice("auto", "sum", "mean", "joint")]
    scope: Annotated[str, TRAJECTORY, choice("micro_batch", "step")]
    warn_after_steps: Annotated[int | None, SHOWN, at_least(1)]


@dataclass(kw_only=True)
class OptimizerConfig:
    """The keys of every optimizer. options.py adds those of each optimizer, and a user's class adds its arguments."""

    name: Annotated[str, TRAJECTORY, OPEN]
    lr: Annotated[float, RATE, not_negative]
    weight_decay: Annotated[float, RATE, not_negative]
    # [{pattern, lr, weight_decay, name}], first match wins
    groups: Annotated[list[dict[str, Any]], TRAJECTORY, only("pattern", "lr", "weight_decay", "name")]
    _target_: Annotated[str | None, TRAJECTORY, classes("torch.optim")] = None  # a custom class, instead of `name`


@dataclass(kw_only=True)
class ScheduleConfig:
    """The keys of every schedule. options.py adds those of each schedule, and a user's class adds its `Options`."""

    name: Annotated[str, RATE, OPEN]
    _target_: Annotated[str | None, RATE, classes()] = None
    warmup_steps: Annotated[int | None, RATE, not_negative]
    warmup_ratio: Annotated[float | None, RATE, up_to_one]


_DEEPSPEED = ReadWhere(lambda c: c.trainer.strategy == "deepspeed", "set trainer.strategy=deepspeed")
_FSDP = ReadWhere(lambda c: c.trainer.strategy in ("fsdp", "fsdp_tp"), "set trainer.strategy=fsdp")
_FSDP_ONLY = ReadWhere(lambda c: c.trainer.strategy == "fsdp", "set trainer.strategy=fsdp")
_FSDP_TP = ReadWhere(lambda c: c.trainer.strategy == "fsdp_tp", "set trainer.strategy=fsdp_tp")
_SAMPLED = ReadWhere(lambda c: c.callbacks.samples.every_n_validations, "set callbacks.samples.every_n_validations=1")
_FP8 = ReadWhere(lambda c: c.trainer.precision == FP8, "set trainer.precision=fp8 too")


@dataclass(kw_only=True)
class FsdpConfig:
    reshard_after_forward: Annotated[bool, MACHINE]
    cpu_offload: Annotated[bool, MACHINE]
    copy_per_node: Annotated[bool, MACHINE]
    reduce_each_micro_batch: Annotated[bool, MACHINE]
    sharded_checkpoint: Annotated[bool | None, MACHINE]
    tensor_parallel_size: Annotated[int, MACHINE, at_least(2), _FSDP_TP]
    sequence_parallel: Annotated[bool, MACHINE, _FSDP_TP]
    context_parallel_size: Annotated[int, MACHINE, at_least(1), _FSDP_ONLY]


@dataclass(kw_only=True)
class DeepSpeedConfig:
    stage: Annotated[int, MACHINE, between(1, 3)]
    offload_optimizer: Annotated[str | None, MACHINE, choice("cpu", "nvme")]  # cpu or nvme
    offload_parameters: Annotated[str | None, MACHINE, choice("cpu", "nvme")]
    nvme_path: Annotated[str, MACHINE, just("/local_nvme")]
    config: Annotated[str | None, MACHINE]


@dataclass(kw_only=True)
class TrainerConfig:
    # Up to inference_mode: arguments of Lightning's Trainer under its own names (docs/lightning.md lists all).
    fast_dev_run: Annotated[bool | int, SHOWN, not_negative]
    overfit_batches: Annotated[int, TRAJECTORY, not_negative]
    profiler: Annotated[str | None, SHOWN, choice("simple", "advanced", "pytorch")]
    detect_anomaly: Annotated[bool, MACHINE]
    benchmark: Annotated[bool, MACHINE]
    inference_mode: Annotated[bool, MACHINE]
    max_steps: Annotated[int | None, RATE, at_least(1), TRAINING]
    max_epochs: Annotated[int | None, RATE, at_least(1), TRAINING]
    accelerator: Annotated[str, MACHINE, choice("auto", "cpu", "gpu", "cuda")]
    devices: Annotated[int | str, MACHINE, OPEN]
    num_nodes: Annotated[int, MACHINE, at_least(1)]
    max_restarts: Annotated[int, SHOWN, not_negative]
    rank_timeout: Annotated[int, SHOWN, at_least(1)]
    strategy: Annotated[str, MACHINE, choice(*STRATEGIES)]
    fsdp: Annotated[FsdpConfig, _FSDP]
    deepspeed: Annotated[DeepSpeedConfig, _DEEPSPEED]
    precision: Annotated[str, MODEL, choice(*PRECISIONS)]  # also used to compute a reference model
    fp8_recipe: Annotated[str, TRAJECTORY, choice("tensorwise", "rowwise", "rowwise_with_gw_hp"), _FP8]  # torchao's
    val_check_interval: Annotated[int | None, SHOWN, at_least(1), TRAINING]
    val_before_training: Annotated[bool, SHOWN]
    limit_val_batches: Annotated[int | None, VALIDATION, at_least(1)]
    log_every_n_steps: Annotated[int | None, SHOWN, at_least(1), TRAINING]
    save_every_n_steps: Annotated[int | None, SHOWN, at_least(1), TRAINING]
    gradient_clip_val: Annotated[float | None, TRAJECTORY, TRAINING]
    max_bad_steps: Annotated[int, RATE, at_least(1)]
    deterministic: Annotated[bool | str, MACHINE, choice("warn")]
    compile: Annotated[bool | str, MACHINE, choice("auto")]
    activation_checkpointing: Annotated[bool | str, MACHINE, choice("auto", "selective", "offload")]
    num_threads: Annotated[int | None, MACHINE, at_least(1)]


@dataclass(kw_only=True)
class EarlyStoppingConfig:
    enabled: Annotated[bool, RATE]
    monitor: Annotated[str, RATE, OPEN]
    mode: Annotated[str, RATE, choice("min", "max")]
    patience: Annotated[int, RATE, at_least(1)]
    threshold: Annotated[float, RATE]
    stop_at: Annotated[float | None, RATE]


@dataclass(kw_only=True)
class EmaConfig:
    """An exponential moving average of the weights; see callbacks/average.py."""

    enabled: Annotated[bool, RATE]
    decay: Annotated[float, RATE, share]


@dataclass(kw_only=True)
class SamplesConfig:
    every_n_validations: Annotated[int, SHOWN, not_negative]
    prompts: Annotated[list[str], SHOWN, OPEN]
    max_new_tokens: Annotated[int, SHOWN, at_least(1)]
    temperature: Annotated[float, SHOWN, not_negative]
    top_k: Annotated[int | None, SHOWN, at_least(1)]
    no_repeat: Annotated[int | None, SHOWN, at_least(2)]
    reading: Annotated[str | None, SHOWN, choice("python")]
    rows: Annotated[int, SHOWN, not_negative]  # validation rows with generated answers shown beside their references
    # Metrics of those answers: bleu, rouge, exact_match, or {_target_: ...}
    metrics: Annotated[list[Any], SHOWN, METRICS, _SAMPLED]


@dataclass(kw_only=True)
class ProgressConfig:
    style: Annotated[str, SHOWN, choice("auto", "rich", "plain", "none")]


@dataclass(kw_only=True)
class CallbacksConfig:
    early_stopping: EarlyStoppingConfig
    ema: EmaConfig
    samples: SamplesConfig
    progress: ProgressConfig
    extra: Annotated[list[dict[str, Any]], RATE]  # a user's own Lightning callbacks, each with its _target_


@dataclass(kw_only=True)
class CheckpointConfig:
    keep_last: Annotated[int, SHOWN, at_least(1)]
    keep_best: Annotated[int, SHOWN, not_negative]
    keep_every: Annotated[int | None, SHOWN, at_least(1)]
    min_val_rows: Annotated[int, SHOWN, not_negative]
    async_save: Annotated[bool, SHOWN]
    monitor: Annotated[str, SHOWN, OPEN]
    mode: Annotated[str, SHOWN, choice("min", "max")]


@dataclass(kw_only=True)
class ExportConfig:
    checkpoint: Annotated[str, SHOWN, OPEN, ReadBy(("export",))]
    enabled: Annotated[bool, SHOWN]
    dtype: Annotated[str, SHOWN, choice("float32", "bfloat16", "float16")]
    merge: Annotated[bool, SHOWN]
    generation: Annotated[dict[str, Any] | None, SHOWN, NUMBERS]  # fields of transformers' GenerationConfig
    push_to: Annotated[str | None, SHOWN]
    push_private: Annotated[bool, SHOWN, just(True)]


_MANY_PROMPTS = ReadWhere(lambda c: c.generate.prompts_file is not None, "set generate.prompts_file too")
_ONE_PROMPT = ReadWhere(lambda c: c.generate.prompts_file is None, "generate.prompts_file names the prompts")
_IN_CHAT = ReadWhere(lambda c: c.generate.chat is not False, "leave generate.chat=false out")


@dataclass(kw_only=True)
class GenerateConfig:
    prompt: Annotated[str, SHOWN, OPEN, _ONE_PROMPT]
    prompts_file: Annotated[str | None, SHOWN, SOURCE]
    out: Annotated[str | None, SHOWN, _MANY_PROMPTS]
    batch_size: Annotated[int, SHOWN, at_least(1), _MANY_PROMPTS]
    chat: Annotated[bool | str, SHOWN, choice("auto")]
    system_prompt: Annotated[str | None, SHOWN, OPEN, _IN_CHAT]
    template_options: Annotated[dict[str, Any] | None, SHOWN, OPEN, _IN_CHAT]
    num_samples: Annotated[int, SHOWN, at_least(1)]
    max_new_tokens: Annotated[int, SHOWN, at_least(1)]
    temperature: Annotated[float, SHOWN, not_negative]
    top_k: Annotated[int | None, SHOWN, at_least(1)]
    checkpoint: Annotated[str, SHOWN, OPEN]


@dataclass(kw_only=True)
class ChatConfig:
    web: Annotated[bool, SHOWN, just(False)] = False
    port: Annotated[int | None, SHOWN, CLOSED, between(1, 65535)] = None
    against: Annotated[str | None, SHOWN, SOURCE] = None


@dataclass(kw_only=True)
class EvaluateConfig:
    data: Annotated[str, SHOWN, choice("auto", "run", "named")]
    checkpoint: Annotated[str, SHOWN, OPEN]
    against: Annotated[str | None, SHOWN, SOURCE]
    reference: Annotated[str | None, SHOWN, SOURCE]
    name: Annotated[str | None, SHOWN, OPEN, name_of_file]
    dir: Annotated[str | None, SHOWN]
    limit: Annotated[int | None, SHOWN, at_least(1)]
    context: Annotated[int | None, SHOWN, at_least(2)]
    stride: Annotated[int | None, SHOWN, at_least(1)]
    start_token: Annotated[bool, SHOWN]
    batch_size: Annotated[int, SHOWN, at_least(1)]
    precision: Annotated[str, SHOWN, choice("float32", "bfloat16")]
    answers: Annotated[int, SHOWN, between(0, 256)]  # as many rows as are kept as text
    max_new_tokens: Annotated[int, SHOWN, at_least(1)]
    metrics: Annotated[list[Any], SHOWN, METRICS]
    resamples: Annotated[int, SHOWN, at_least(1)]
    tasks: Annotated[list[str], SHOWN]
    task_folder: Annotated[str | None, SHOWN, CODE]
    fewshot: Annotated[int | None, SHOWN, not_negative]
    chat: Annotated[bool, SHOWN]


@dataclass(kw_only=True)
class EstimateConfig:
    device: Annotated[str | None, SHOWN, OPEN]
    tokens_per_s: Annotated[float | None, SHOWN, above_zero]
    mfu: Annotated[float, SHOWN, above_zero]


@dataclass(kw_only=True)
class ReportConfig:
    enabled: Annotated[bool, SHOWN]


@dataclass(kw_only=True)
class TuneConfig:
    lr: Annotated[bool, SHOWN]
    micro_batch_size: Annotated[bool, SHOWN]
    apply: Annotated[bool, SHOWN]
    steps: Annotated[int, SHOWN, at_least(20)]
    min_lr: Annotated[float | None, SHOWN, above_zero]
    max_lr: Annotated[float | None, SHOWN, above_zero]
    dir: Annotated[str | None, SHOWN]


@dataclass(kw_only=True)
class BudgetConfig:
    """What chooses the length of a run: `updates`, and at most one of the others, which then takes precedence."""

    updates: Annotated[int | str | None, SHOWN, OPEN, auto_or_count]
    minutes: Annotated[float | None, SHOWN, above_zero]
    tokens: Annotated[float | None, SHOWN, above_zero]
    flops: Annotated[float | None, SHOWN, above_zero]

    @property
    def chosen(self) -> str | None:
        """The name of the budget that is set, or None."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), None)


BUDGETS = ("minutes", "tokens", "flops")


@dataclass(kw_only=True)
class SweepConfig:
    method: Annotated[str, SHOWN, choice("grid", "optuna")]
    name: Annotated[str | None, SHOWN, OPEN, name_of_folder]
    root: Annotated[str, SHOWN, NEW_FOLDER]
    jobs: Annotated[int, SHOWN, at_least(1)]
    allow_failures: Annotated[bool, SHOWN]
    space: Annotated[dict[str, Any], SHOWN, OPEN]  # {key: values in Hydra's sweep syntax}
    n_trials: Annotated[int | None, SHOWN] = None  # this and the following keys: optuna only
    sampler: Annotated[str | None, SHOWN, choice("tpe", "random")] = None
    seed: Annotated[int | None, SHOWN] = None


@dataclass(kw_only=True)
class Config:
    kept: ClassVar[Mapping[str, Any]] = {}  # set per config by compose.check: values read from the environment
    command: ClassVar[Command] = Command()

    run_dir: Annotated[str | None, SHOWN, SOURCE, ReadBy(("export", "generate"))]
    seed: Annotated[int, TRAJECTORY, between(0, 2**32 - 1)]
    run: RunConfig
    objective: ObjectiveConfig
    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    # {_target_, ...} or {parts: {name: {_target_, weight, ...}}}: rewards/scoring.py
    reward: Annotated[dict[str, Any], TRAJECTORY, REWARDS] = field(default_factory=dict)
    peft: PeftConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    router: RouterConfig
    optimizer: Annotated[OptimizerConfig, TRAINING]
    schedule: Annotated[ScheduleConfig, TRAINING]
    trainer: TrainerConfig
    callbacks: Annotated[CallbacksConfig, TRAINING]
    checkpoint: CheckpointConfig
    logger: Annotated[dict[str, Any], SHOWN, LOGGERS]
    export: ExportConfig
    generate: Annotated[GenerateConfig, ReadBy(("generate",))]
    chat: Annotated[ChatConfig, ReadBy(("chat",))] = field(default_factory=ChatConfig)
    evaluate: EvaluateConfig
    estimate: EstimateConfig
    tune: Annotated[TuneConfig, ReadBy(("tune",))]
    report: ReportConfig
    inspect: Annotated[InspectConfig, ReadBy(("inspect",))]
    prepare: Annotated[PrepareConfig, ReadBy(("prepare",))]
    sweep: SweepConfig
    budget: Annotated[BudgetConfig, ReadBy(("train",))]
    debug: Annotated[dict[str, Any], SHOWN] = field(default_factory=dict)

    def headline(self) -> list[str]:
        """Returns the names of the means shown first: the metrics of samples that are set, then the objective's."""
        entries = self.callbacks.samples.metrics
        named = [e.partition(":")[0] if isinstance(e, str) else e["_target_"].rpartition(".")[2] for e in entries]
        return list(dict.fromkeys([*named, *self.objective.headline]))
