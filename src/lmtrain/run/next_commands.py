"""Commands suggested after a run: to try its model, evaluate it, train it further, or continue a stopped run."""

import os
import re
from pathlib import Path

from lmtrain.config.batch import horizon, step_sizes
from lmtrain.config.effect import TRIAL
from lmtrain.config.override_text import bare_or_quoted, typed_keys
from lmtrain.config.schema import BUDGETS
from lmtrain.data.chat.templates import own_template
from lmtrain.generation.prompts import a_prompt
from lmtrain.models.denoising import mask_token
from lmtrain.run.build import Run
from lmtrain.run_folder.folder import begins_elsewhere, checkpoint_names
from lmtrain.secrets import command

_PROMPT = 40  # maximum number of characters of a prompt


def print_how_to_continue(run: Run) -> None:
    """Prints why the run stopped and the command that continues it, which a sweep or pipeline prints itself."""
    step = run.trainer.global_step
    saved = "the checkpoint is written" if checkpoint_names(run.dir.checkpoints) else "there is no checkpoint yet"
    stopped = f"stopped by {run.objective.stop.why()} at step {step:,} of {run.total_steps:,}; {saved}"
    if os.environ.get(TRIAL):
        run.console.print(f"{stopped}.")
        return
    run.console.print(f"{stopped}. Continue with:")
    print(f"  {continuing(run)}", flush=True)


def next_commands(run: Run, status: str) -> list[str]:
    """Returns the commands a user is likely to run next: generate or chat, evaluate, and train further."""
    here = near(run.dir.path)
    chats = run.config.data.rows != "text" and own_template(run.corpus.tokenizer) is not None
    first = command("chat", [here]) if chats else command("generate", [here, _prompt(run)])
    lines = [] if run.config.objective.scalar_head else [first]  # a scalar head generates no text
    scored = run.corpus.val is not None and mask_token(run.objective.model.model) is None
    lines += [command("evaluate", [here])] if scored else []
    changes = longer(run)
    if status != "stopped_early" and changes:  # else more steps would not help
        lines.append(continuing(run, *changes))
    return lines


def continuing(run: Run, *changes: str) -> str:
    """Returns the command that continues this run, with `changes` replacing its overrides of the same keys."""
    words, keys = run.config.command.words, run.config.command.typed
    named = run.config.run.name is not None and "run.dir" not in keys and keys.get("run.resume", "auto") == "auto"
    where = [] if named else [f"run.dir={bare_or_quoted(near(run.dir.path))}"]
    if not named and (not begins_elsewhere(words) or checkpoint_names(run.dir.path / "checkpoints")):
        where.append("run.resume=auto")
    set_again = {*typed_keys([*changes, *where]), *(f"budget.{name}" for name in BUDGETS if changes)}
    kept = [w for w in words if w.startswith("-") or "=" not in w or not set_again & typed_keys([w]).keys()]
    return command("train", [*kept, *where, *changes])


def near(path: Path) -> str:
    """Returns the path as a user would type it: relative to the current directory if it lies below that."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _prompt(run: Run) -> str:
    """Returns the recipe's prompt or the first words of a validation row of text, else a common opening of stories."""
    given = run.config.callbacks.samples.prompts[:1]
    if given and given[0].isprintable() and given[0].strip() and not given[0].startswith("-"):
        return given[0]
    if run.config.data.rows == "text" and run.corpus.val is not None:
        text = re.sub(r"\s+", " ", a_prompt(run.corpus.val, run.corpus.tokenizer)).strip()
        words = text if len(text) <= _PROMPT else text[:_PROMPT].rpartition(" ")[0]
        if words and words.isprintable() and "\ufffd" not in words and not words.startswith("-"):
            return words
    return "Once upon a time"


def longer(run: Run) -> list[str]:
    """Returns overrides that double the key that ended the run and unset the other key if it would end it earlier.

    The list is empty if a run with a time budget has used up its epochs, as more of them rarely help.
    """
    if run.ended_by is not None:
        return []
    chosen = run.config.budget.chosen
    if chosen is not None:
        return [f"budget.{chosen}={2 * getattr(run.config.budget, chosen):g}"]
    sizes, rows = step_sizes(run.config.data), len(run.data.train_rows)
    steps, epochs = run.config.trainer.max_steps, run.config.trainer.max_epochs
    if epochs is not None and horizon(None, epochs, rows, sizes) == run.total_steps != steps:
        too_few = steps is not None and steps < horizon(None, 2 * epochs, rows, sizes)
        return [f"trainer.max_epochs={2 * epochs}", *(["trainer.max_steps=null"] if too_few else [])]
    wanted = 2 * run.total_steps
    too_few = epochs is not None and horizon(None, epochs, rows, sizes) < wanted
    return [f"trainer.max_steps={wanted}", *(["trainer.max_epochs=null"] if too_few else [])]
