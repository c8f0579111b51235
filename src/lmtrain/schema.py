"""The typed config: every key a user can set, with its type. Defaults live in conf/, never here.

A field without a default must stand in the yaml; one that defaults to None may be absent from yamls it has no
meaning for (AdamW has no `momentum`), and setting it there is refused. `Any` marks what omegaconf can't express.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Run:
    name: str | None
    dir: str | None  # resolved to an absolute path before anything is written
    root: str
    resume: str | None  # none, auto or a checkpoint folder; None: auto for a named run, none for an unnamed one
    allow_change: list[str]  # fingerprint entries that may differ on resume
    schedule_on_resume: str  # keep or rescale
    time_limit: str | None  # HH:MM:SS, measured from the start of the process
    allow_target: list[str]  # package names whose classes `_target_` may name besides the known ones


@dataclass(kw_only=True)
class Objective:
    name: str
    loss_chunk_tokens: int | str
    label_smoothing: float
    z_loss: float | None = None  # absent from dpo
    neftune_alpha: float | None = None  # sft only
    # dpo only
    loss: str | None = None  # one of preference_losses.LOSSES
    beta: float | None = None
    gamma: float | None = None
    dpop_lambda: float | None = None
    sft_weight: float | None = None
    length_normalize: bool | str | None = None  # auto, true or false
    reference: str | None = None  # auto, frozen_copy, adapter_off, precomputed or none


@dataclass(kw_only=True)
class Model:
    name: str
    init: str  # scratch or pretrained
    family: str | None = None  # a transformers model_type: gpt2, llama, qwen3, qwen3_moe
    name_or_path: str | None = None
    revision: str | None = None
    trust_remote_code: bool
    attention: str
    learning_rate: float
    vocab_size: int | None
    vocab_multiple_of: int
    # The fields below are the transformers config's own names.
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str | None = None
    max_position_embeddings: int | None = None
    dropout: float
    tie_word_embeddings: bool | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    initializer_range: float | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    router_aux_loss_coef: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Data:
    source: str  # hub, files, python_stdlib, bins or mixture
    name: str | None
    config_name: str | None
    revision: str | None
    path: Any  # a file, folder or glob, or a list of them
    val_path: Any  # the same, held out for validation
    format: str  # auto, text, jsonl, json, parquet, arrow
    train_split: str
    val_split: str | None
    val_fraction: float
    num_samples: int | None
    streaming: bool
    num_proc: int | None
    cache_dir: str
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    num_workers: int
    isolate_documents: bool
    # Text for pretraining only.
    text_column: Any = None  # a column or a list of columns, joined by column_separator
    column_separator: str | None = None
    sample_by: str | None = None  # for text files: document, paragraph or line
    document_start: str | None = None  # rows are joined into one document until a row that matches this pattern
    min_length: int | None = None
    append_eos: bool | None = None
    shard_tokens: int | None = None
    # Conversations (sft) and preferences (dpo) only.
    mixture: list[dict[str, Any]] | None = None  # [{path or name, config_name, train_split, weight}]
    conversation_format: str | None = None  # auto or one of data.conversations.FORMATS
    columns: dict[str, str] | None = None  # what a format's column is called in this data: {prompt: question}
    prompt_template: str | None = None  # text with {column} in it
    response_template: str | None = None
    system_prompt: str | None = None  # put before conversations that have none
    chat_template: str | None = None  # None: the tokenizer's own; a name of ours; a Jinja file
    train_on: str | None = None  # assistant, last_assistant, completion or all
    max_length: int | None = None
    on_too_long: str | None = None  # truncate_left, truncate_right, drop, split or raise
    on_bad_row: str | None = None  # raise or skip
    max_untrained: float | None = None  # share of rows without a trained token above which the run is refused
    ranking: str | None = None  # dpo: best_worst or all
    share_prompts: bool | None = None  # dpo
    packing: str | None = None  # off, concat, greedy, first_fit or best_fit_decreasing


@dataclass(kw_only=True)
class Tokenizer:
    kind: str  # hub, bpe, bytes or char
    name_or_path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    vocab_size: int | None = None
    min_frequency: int | None = None
    train_characters: int | None = None
    add_tokens: list[str] | None = None  # special tokens to add, such as <|im_start|>


@dataclass(kw_only=True)
class Peft:
    method: str  # none or lora
    adapter: str | None = None  # folder or hub name of an adapter to go on training
    r: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    target_modules: Any = None  # all-linear, a regular expression, or a list of names
    modules_to_save: list[str] | None = None
    bias: str | None = None  # none, all or lora_only
    use_rslora: bool | None = None
    use_dora: bool | None = None
    init_weights: str | None = None  # default, pissa, pissa_niter_<n>, ...
    quantization: str | None = None  # nf4, fp4 or int8: how the frozen base is stored
    double_quant: bool | None = None
    learning_rate: float | None = None


@dataclass(kw_only=True)
class Optimizer:
    name: str
    lr: float
    weight_decay: float
    groups: list[dict[str, Any]]  # [{pattern, lr, weight_decay, name}], first match wins
    fused: bool | str | None = None
    betas: Any = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    ns_steps: int | None = None
    clip_threshold: float | None = None
    beta2_decay: float | None = None
    min_parameter_rms: float | None = None
    adamw_pattern: str | None = None
    full_state_pattern: str | None = None


@dataclass(kw_only=True)
class Schedule:
    name: str
    warmup_steps: int | None
    warmup_ratio: float | None
    min_lr_ratio: float | None = None
    num_cycles: int | None = None
    power: float | None = None
    decay_ratio: float | None = None
    decay_shape: str | None = None
    timescale: int | None = None


@dataclass(kw_only=True)
class Fsdp:
    reshard_after_forward: bool
    cpu_offload: bool
    copy_per_node: bool
    reduce_each_micro_batch: bool
    sharded_checkpoint: bool
    tensor_parallel_size: int  # fsdp_tp only


@dataclass(kw_only=True)
class DeepSpeed:
    stage: int
    offload_optimizer: str | None  # cpu or nvme
    offload_parameters: str | None
    nvme_path: str
    config: str | None


@dataclass(kw_only=True)
class Trainer:
    max_steps: int | None
    max_epochs: int | None
    accelerator: str
    devices: int | str
    num_nodes: int
    max_restarts: int
    strategy: str
    fsdp: Fsdp
    deepspeed: DeepSpeed
    precision: str
    val_check_interval: int | None
    limit_val_batches: int | None
    log_every_n_steps: int
    save_every_n_steps: int | None
    gradient_clip_val: float | None
    max_bad_steps: int
    spike_factor: float | None
    spike_window: int
    compile: bool | str
    activation_checkpointing: bool | str
    num_threads: int | None


@dataclass(kw_only=True)
class EarlyStopping:
    enabled: bool
    monitor: str
    mode: str
    patience: int
    threshold: float


@dataclass(kw_only=True)
class Samples:
    every_n_validations: int
    prompts: list[str]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    rows: int  # sft and dpo: validation rows whose answers are written beside their references
    metrics: list[Any]  # bleu, rouge, exact_match, or {_target_: ...}, over those answers


@dataclass(kw_only=True)
class Progress:
    style: str  # auto, rich, plain or none
    plain_every_seconds: float


@dataclass(kw_only=True)
class Callbacks:
    early_stopping: EarlyStopping
    samples: Samples
    progress: Progress
    extra: list[dict[str, Any]]  # a user's own Lightning callbacks, each with its _target_


@dataclass(kw_only=True)
class Checkpoint:
    keep_last: int
    keep_best: int
    keep_every: int | None
    async_save: bool
    monitor: str
    mode: str


@dataclass(kw_only=True)
class Generate:
    prompt: str
    chat: bool | str  # auto, true or false
    system_prompt: str | None
    num_samples: int
    max_new_tokens: int
    temperature: float
    top_k: int | None
    checkpoint: str


@dataclass(kw_only=True)
class Inspect:
    split: str  # train or val
    samples: int
    tokens: int
    html: str | None


@dataclass(kw_only=True)
class Export:
    checkpoint: str
    enabled: bool
    dtype: str
    merge: bool


@dataclass(kw_only=True)
class Sweep:
    method: str  # grid or optuna
    name: str | None
    root: str
    jobs: int
    allow_failures: bool
    space: dict[str, Any]  # {a key: its values in Hydra's syntax for sweeps}
    n_trials: int | None = None  # optuna only, as the rest
    sampler: str | None = None  # tpe or random
    startup_trials: int | None = None
    seed: int | None = None


@dataclass(kw_only=True)
class Config:
    run_dir: str | None
    seed: int
    run: Run
    objective: Objective
    model: Model
    data: Data
    tokenizer: Tokenizer
    peft: Peft
    optimizer: Optimizer
    schedule: Schedule
    trainer: Trainer
    callbacks: Callbacks
    checkpoint: Checkpoint
    logger: dict[str, Any]
    export: Export
    generate: Generate
    inspect: Inspect
    sweep: Sweep
    debug: dict[str, Any] = field(default_factory=dict)
