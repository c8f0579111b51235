"""The base under its adapters: LoRA and memory turned off for a while."""

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedModel

from lmtrain.adapters.memory_adapter import without_memory
from lmtrain.adapters.trainable import adapter_of


@contextlib.contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model is its frozen base: a reference model at no cost in memory.

    Raises:
        UserError: the adapter moved the base's weights.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_memory(model))
        if adapter_of(model) is not None:
            from lmtrain.adapters import lora

            stack.enter_context(lora.disabled(model))
        yield
