"""Supervised fine-tuning: next-token prediction of the tokens that carry a label."""

from lmtrain.config.options import SFTConfig
from lmtrain.objectives.causal_lm import CausalLM


class SFT(CausalLM):
    """Fine-tuning. A micro-batch is {input_ids, labels, seen, [position_ids, cu_seqlens]}; labels on learned tokens."""

    Options = SFTConfig
