"""torch.compile of the decoder blocks: few variants, and word when torch gives up on them."""

import logging

import torch
import torch._dynamo
from torch import Tensor
from transformers import PreTrainedModel

from lmtrain.models.blocks import decoder_blocks

log = logging.getLogger(__name__)

# Blocks of one shape share their code, and torch counts variants by code: trained and not, with an adapter and without,
# sliding and full attention are a dozen. Past its own limit of 8 torch runs blocks uncompiled.
VARIANTS = 64


def compile_model(model: PreTrainedModel, changing_lengths: bool = False, backend: str = "inductor") -> None:
    """torch.compile of every block, in place, so that parameter names stay; blocks of one shape share the code.

    Args:
        changing_lengths: micro-batches differ in length: code for any length at once, not for the first one first.
        backend: of torch.compile.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(f, _GivesUp) for f in logger.filters):
        logger.addFilter(_GivesUp())
    for block in decoder_blocks(model):
        block.compile(dynamic=True if changing_lengths else None, backend=backend)


def let_grow(*tensors: Tensor, dim: int = 0) -> None:
    """Tells torch.compile that tensors will come in other sizes along `dim`, so that it makes code for any at once."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class _GivesUp(logging.Filter):
    """Says in plain words what torch's own warning means, once."""

    said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if "recompile_limit" in record.getMessage() and not self.said:
            self.said = True
            log.warning(
                "torch.compile has made more than %d variants of a block and runs further ones uncompiled, slower: "
                "trainer.compile=false makes none (TORCH_LOGS=recompiles shows why)",
                torch._dynamo.config.recompile_limit,
            )
        return True
