"""What somebody else's file may set in sections with free keys: arguments of rewards, loggers, metrics and models.

Any other name in such a section counts only where the user types it (constraints.py).
"""

from lmtrain.config.constraints import Open, only

REWARDS = only(
    "weight", "column", "after", "reference_after", "right", "wrong", "pattern", "whole", "thought", "answer", "most",
    "least", "scale", "name_or_path", "batch_size",
    of=("lmtrain.rewards.text", "lmtrain.rewards.model"),
)  # fmt: skip
LOGGERS = only("flush_secs", "project", "name", "mode", "tags", "group", "notes", "experiment_name", "run_name")
METRICS = only("", of=("lmtrain.generation.text_metrics",))
MODEL_FIELDS = Open(
    "numbers, true and false; `layer_types`, `rope_type`",
    lambda name, value, theirs: isinstance(value, int | float) or name in ("layer_types", "rope_type"),
)
