"""The plan's rows on a model: its size, what of its files is left out, and how it mixes tokens."""

from transformers import PreTrainedModel

from lmtrain.config.schema import Config
from lmtrain.models.flops import parameter_counts
from lmtrain.models.mixers import by_rows
from lmtrain.models.wrapper import describe_left_out, wrapper_of
from lmtrain.terminal import si


def plan_rows(model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
    """Returns rows (title, text); the text is empty where there is nothing to say."""
    total, trained, embedding = parameter_counts(model)
    wrapper, layers = wrapper_of(model), by_rows(model)
    own_attention = getattr(model, "own_attention_because", None)
    size = f"{si(total)} parameters ({si(trained)} trained, {si(embedding)} in embeddings)"
    return [
        ("model", f"{config.model.name}: {size}"),
        ("left out", describe_left_out(wrapper) if wrapper is not None else ""),
        ("attention", f"the model's own: {own_attention}" if own_attention else ""),
        ("mixers", f"{layers} layers read each packed document as a row of its own" if layers else ""),
    ]
