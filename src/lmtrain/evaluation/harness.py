"""Tasks of EleutherAI's lm-evaluation-harness, run on a loaded model through the harness's Hugging Face class."""

from importlib.metadata import version
from typing import Any

import numpy as np

from lmtrain.config.schema import Config
from lmtrain.data.framing import before_documents
from lmtrain.distributed import process_group as world
from lmtrain.errors import UserError, did_you_mean, needing
from lmtrain.evaluation.results import Evaluated, Scores
from lmtrain.evaluation.subject import Subject
from lmtrain.generation.sampling import positions
from lmtrain.models.scalar_head import refuse_scalar_head


def find(config: Config) -> Any:
    """Returns a task manager of the harness that knows evaluate.tasks, in evaluate.task_folder or among its own tasks.

    Raises:
        UserError: the harness is not installed, or a task is unknown.
    """
    with needing("lm-eval", "evaluate.tasks"):
        from lm_eval.tasks import TaskManager

    names, folder = config.evaluate.tasks, config.evaluate.task_folder
    own = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if own is not None and set(names) <= set(own.all_tasks):
        return own
    manager = TaskManager(include_path=folder)  # slow: reads the harness's thousands of tasks
    for name in names:
        if name not in manager.task_index:
            hint = did_you_mean(name, manager.all_tasks, most=3)
            where = f" and {folder}" if folder else ""
            raise UserError(f"evaluate.tasks: lm-eval {version('lm-eval')}{where} has no task {name!r}{hint}")
    return manager


def evaluate(who: Subject, config: Config, manager: Any) -> Evaluated:
    """Scores `who` on evaluate.tasks, document by document; `manager` is the result of `find`.

    Raises:
        UserError: a task's data can't be loaded, or the model has a scalar head.
    """
    refuse_scalar_head(who.model.model, "a task of the harness")
    e, found = config.evaluate, run(who, config, manager)
    columns, ratios, whole = dict[str, np.ndarray](), dict[str, tuple[str, str]](), dict[str, float]()
    samples = [(task, s) for task, of_task in found["samples"].items() for s in of_task]
    for task, numbers in found["results"].items():
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            several = sum(other.partition(",")[0] == metric for other in numbers) > 1
            suffix = f" ({kind})" if several and kind != "none" else ""
            name = f"{task}/{metric}{suffix}"
            # A task that reads answers in several ways (filters) has a sample of each document for each of them.
            own = np.array([of == task and s.get("filter", kind) == kind for of, s in samples])
            each = [_number(s.get(metric)) if mine else 0.0 for mine, (_, s) in zip(own, samples, strict=True)]
            if own.any() and None not in each and np.isclose(sum(each) / own.sum(), value):  # type: ignore[arg-type]
                columns[name], columns[f"{task}/documents{suffix}"] = np.array(each, dtype=float), own.astype(float)
                ratios[name] = (name, f"{task}/documents{suffix}")
            else:
                whole[name] = float(value)  # not a mean over documents
    if not columns:
        columns["documents"] = np.ones(max(1, len(samples)))
    texts = {"task": [task for task, _ in samples]}
    known = {f"documents of {task}": len({s["doc_id"] for s in of}) for task, of in found["samples"].items()}
    used = {"harness": version("lm-eval"), "fewshot": e.fewshot, "precision": e.precision, "chat": e.chat,
            "tasks": {name: found["versions"].get(name) for name in e.tasks}}  # fmt: skip
    return Evaluated(Scores(columns, ratios, whole, texts), known, used)


def run(who: Subject, config: Config, manager: Any) -> dict[str, Any]:
    """Returns results, versions and samples with log-likelihoods of the harness's `simple_evaluate`, on every rank."""
    check_limit(config.evaluate.limit)
    return world.gathered(world.together(lambda: _run(who, config, manager)))[0]


def check_limit(limit: int | None) -> None:
    """Raises UserError if evaluate.limit is below the number of ranks: the harness needs a document per rank."""
    if limit is not None and world.size() > limit:
        raise UserError(f"evaluate.limit={limit} documents for {world.size()} devices: set trainer.devices={limit}")


def _run(who: Subject, config: Config, manager: Any) -> dict[str, Any]:
    """Returns the used parts of what `simple_evaluate` returns, samples in document order; {} on all but rank 0."""
    import torch
    from lm_eval import simple_evaluate

    e = config.evaluate
    autocast = torch.autocast(who.model.model.device.type, torch.bfloat16, enabled=e.precision == "bfloat16")
    with autocast:
        model = _model(who, config)
        try:
            found = simple_evaluate(
                model,
                tasks=e.tasks,
                task_manager=manager,
                num_fewshot=e.fewshot,
                limit=e.limit,
                apply_chat_template=e.chat,
                bootstrap_iters=0,
                random_seed=config.seed,
                numpy_random_seed=config.seed,
                torch_random_seed=config.seed,
                fewshot_random_seed=config.seed,
            )
        except (OSError, ValueError, KeyError) as error:  # datasets and the harness raise these for missing data
            said = " ".join(str(error).split())
            raise UserError(f"evaluate.tasks={','.join(e.tasks)}: {type(error).__name__}: {said}") from error
    if found is None:
        return {}
    samples = {task: sorted(of_task, key=lambda s: s["doc_id"]) for task, of_task in found["samples"].items()}
    return {"results": found["results"], "versions": found["versions"], "samples": samples}


def _model(who: Subject, config: Config) -> Any:
    """Wraps the model in the harness's HFLM class; each rank evaluates its share of the documents."""
    from lm_eval.models.huggingface import HFLM

    class OnRanks(HFLM):
        rank = property(lambda self: world.rank())
        world_size = property(lambda self: world.size())

        def all_gather(self, tensor: Any) -> Any:
            return tensor.new_tensor(world.gathered(tensor.tolist()))

        def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
            found = world.gathered(obj)
            return found if world.rank() == dst else None

        def barrier(self) -> None:
            world.gathered(None)

    hf_model = who.model.model
    return OnRanks(
        hf_model,
        tokenizer=who.tokenizer,
        backend="causal",
        batch_size=config.evaluate.batch_size,
        # None: what the tokenizer puts before a text; before a chat stands only what the chat template writes there.
        add_bos_token=False if config.evaluate.chat else None,
        prefix_token_id=next(reversed(before_documents(who.tokenizer)), None),
        max_length=config.evaluate.context or min(positions(hf_model), 2**20),
        softmax_dtype="float32",
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, bool | int | float | np.number) else None
