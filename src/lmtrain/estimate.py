"""What a run would cost: `python -m lmtrain.estimate model=llama_7b trainer.devices=8 estimate.device=h100`."""

import sys
from typing import TYPE_CHECKING, Any

from lmtrain import cli, errors, terminal
from lmtrain.config.schema import Config

if TYPE_CHECKING:
    from lmtrain.run.estimation import Device


def estimate(config: Config) -> int:
    """Prints parameters, FLOPs, sizes, memory under each strategy, time, and what would make it fit."""
    from rich.table import Table

    from lmtrain.config.batch import split_over
    from lmtrain.run import estimation
    from lmtrain.run.plan import gib
    from lmtrain.run.quiet import quiet_libraries

    quiet_libraries()
    device = estimation.device_of(config)
    estimation.resolve(config)
    split_over(config, int(config.trainer.devices) * config.trainer.num_nodes)  # refused as a run's would be
    model = estimation.build(config)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, words in rows(model, config, device):
        table.add_row(name, words)
    console = terminal.console()
    console.print(table)
    room = device.bytes * (1 - config.estimate.headroom)
    chosen = sum(estimation.memory(model, config).values())
    console.print(memory_table(estimation.by_strategy(model, config), room))
    if chosen <= room:
        console.print(
            f"fits: {gib(chosen)} of {gib(room)} on {device.words} with trainer.strategy={config.trainer.strategy}"
        )
        return errors.FINISHED
    ways = estimation.ways_to_fit(model, config, room)
    console.print(f"does not fit: {gib(chosen)} on {device.words}, where {gib(room)} can be used")
    for way in ways:
        console.print(
            f"  {' '.join(way.overrides)}   (a step takes about {way.slower:.2f} times as long)", soft_wrap=True
        )
    if not ways:
        console.print("  no strategy, smaller micro-batch or 8-bit optimizer makes it fit: more devices, a shorter "
                      "data.seq_len, a smaller model or peft=lora would")  # fmt: skip
    return errors.FINISHED


def rows(model: Any, config: Config, device: "Device") -> list[tuple[str, str]]:
    """(what, in words) of everything that does not depend on the strategy."""
    from lmtrain.config.batch import step_sizes
    from lmtrain.models import flops
    from lmtrain.run import estimation
    from lmtrain.run.plan import gib, si

    c, t = config, config.trainer
    total, trained, tables = flops.parameter_counts(model)
    per_token = flops.flops_per_token(model, c.data.seq_len)
    step = c.data.global_batch_size * c.data.seq_len
    tokens = step_sizes(c.data).before(t.max_steps) * c.data.seq_len if t.max_steps is not None else None
    world = int(t.devices) * t.num_nodes
    kept = c.checkpoint.keep_last + c.checkpoint.keep_best
    saved = estimation.checkpoint_bytes(model, c)
    width = 2 if model.config.get_text_config().vocab_size <= 2**16 else 4
    bins = f"{width} bytes a token" + (
        f", {si(width * tokens, 'B')} for {si(tokens)} different tokens" if tokens else ""
    )
    found = [
        ("model", f"{c.model.name}: {total:,} parameters ({si(trained)} trained, {si(tables)} in embeddings)"),
        ("devices", f"{world} x {device.words}, {gib(device.bytes)} each; {t.precision}, {c.optimizer.name}"),
        ("step", f"{c.data.global_batch_size:,} rows x {c.data.seq_len:,} = {step:,} tokens"),
        (
            "compute",
            f"{si(per_token, 'FLOP')} a token" + (f", {si(per_token * tokens, 'FLOP')} in all" if tokens else ""),
        ),
        ("checkpoint", f"{gib(saved)}; up to {kept} kept: {gib(kept * saved)}"),
        ("bins", bins),
    ]
    return [*found, ("time", time_words(c, device, tokens, per_token, world))]


def time_words(c: Config, device: "Device", tokens: int | None, per_token: float, world: int) -> str:
    """How long the run takes, and by which speed."""
    from lmtrain.run import plan_time

    speed, by = c.estimate.tokens_per_s, "estimate.tokens_per_s"
    if speed is None and device.peak is not None:
        speed = c.estimate.mfu * device.peak * world / per_token
        by = f"{c.estimate.mfu:.0%} of the peak, {speed:,.0f} tokens/s"
    if tokens is None:
        return "set trainer.max_steps: how many an epoch has is in the data"
    if speed is None:
        return "not known for this device: set estimate.tokens_per_s to what a short run reaches"
    return f"{plan_time.span(tokens / speed)} ({by})"


def memory_table(found: dict[str, dict[str, int]], room: float) -> Any:
    """A row a strategy: memory of a device by part, and whether it fits."""
    from rich import box
    from rich.table import Table

    most = max((sum(memory.values()) for memory in found.values()), default=0)
    unit, digits, name = (2**30, 1, "GiB") if most >= 2**32 else (2**20, 0, "MiB")
    table = Table(title=f"memory of a device, {name}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    parts = list(dict.fromkeys(name for memory in found.values() for name in memory))
    table.add_column("strategy", no_wrap=True)
    short = {"parameters": "weights", "gradients": "grads", "optimizer": "optim.", "activations": "activ."}
    for name in [*parts, "all"]:
        table.add_column(short.get(name, name), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for strategy, memory in found.items():
        size = sum(memory.values())
        sizes = [f"{number / unit:,.{digits}f}" for number in (*(memory.get(part, 0) for part in parts), size)]
        table.add_row(strategy, *sizes, "fits" if size <= room else "too large")
    return table


def main(argv: list[str] | None = None) -> int:
    return cli.run("estimate", estimate, argv)


if __name__ == "__main__":
    sys.exit(main())
