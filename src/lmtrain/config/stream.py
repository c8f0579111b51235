"""What a stream larger than the disk (data.ring_bytes) goes with."""

from lmtrain.config.schema import Config, DataConfig
from lmtrain.errors import UserError


def leave_out_ring(data: DataConfig) -> None:
    """Without a stream no key of its ring shapes anything: a checkpoint is not to be compared by them."""
    if data.ring_bytes is None:
        data.ring_shard_tokens = data.ring_window = data.ring_val_tokens = data.ring_patience = None


def check_stream(c: Config) -> None:
    """Raises UserError for the first setting that makes no sense with data.ring_bytes."""
    d, t = c.data, c.trainer
    if d.ring_bytes is None:
        return
    here = f"data.ring_bytes={d.ring_bytes}"
    if d.rows != "text" or d.source not in ("hub", "files"):
        held = d.rows if d.rows != "text" else f"data.source={d.source}"
        raise UserError(
            f"{here} streams text of files or of the hub, and this data is {held}: set data.ring_bytes=null, or choose "
            f"data=text data.path=folder, data=jsonl, data=c4, ..."
        )
    if not d.streaming:
        raise UserError(f"{here} goes with data.streaming=true: set that too, or data.ring_bytes=null")
    for name in ("ring_shard_tokens", "ring_window", "ring_val_tokens", "ring_patience"):
        if getattr(d, name) is None:
            raise UserError(f"data.{name} has no value: set data.{name}=...")
    if t.max_steps is None or t.max_epochs is not None:
        raise UserError(
            f"{here}: how many rows a stream has isn't known, so the run ends by steps: set trainer.max_steps=... and "
            f"trainer.max_epochs=null"
        )
    if c.tokenizer.kind == "char":
        raise UserError(f"{here}: tokenizer=char is made from all of the text: choose tokenizer=bytes, bpe or gpt2")
    wrong = {
        "data.num_samples": (d.num_samples, "null"),
        "data.val_path": (d.val_path, "null, and data.val_sets to validate on more than the stream's head"),
        "data.val_train_rows": (d.val_train_rows, "0"),
        "data.document_start": (d.document_start, "null"),
        "data.packing": (d.packing, "null"),
        "data.curriculum.by": (d.curriculum.by, "null"),
        "data.fim.rate": (d.fim.rate, "0"),
        "data.batch_warmup.start_size": (d.batch_warmup.start_size, "null"),
        "trainer.overfit_batches": (t.overfit_batches, "0"),
    }
    for key, (value, instead) in wrong.items():
        if value:
            raise UserError(f"{key}={value} doesn't go with a stream ({here}): set {key}={instead}")
