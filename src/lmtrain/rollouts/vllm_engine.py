"""Sampling by vLLM on the training device, behind the same interface (an optional extra, for CUDA).

vLLM has its own kernels, so its log-probabilities differ from the trainer's: train/sampler_difference says by how
much, and objective.importance_cap corrects for it. It also has its own random numbers: they are seeded by each
completion's key, but other batches may give other completions.
"""

import importlib.util
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.rollouts.engine import Engine, PrefixCache, Request, SampledText, Sampling

MEMORY_SHARE = 0.3  # share of the device's memory for vLLM's weights and cache


class VLLM(Engine):
    """An engine that is created at the first rollout; the trained weights are copied into it before each rollout."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UserError if vLLM is not installed."""
        if importlib.util.find_spec("vllm") is None:
            raise UserError('objective.engine=vllm needs vLLM: pip install "lmtrain[vllm]", or use in_process')
        self.model = model
        self.engine: Any = None

    def _started(self) -> Any:
        import vllm  # type: ignore[import-not-found,unused-ignore]

        with tempfile.TemporaryDirectory(prefix="lmtrain-vllm-") as folder:
            self.model.save_pretrained(folder)
            return vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                gpu_memory_utilization=MEMORY_SHARE,
                enforce_eager=True,
                distributed_executor_backend="external_launcher",
                logprobs_mode="processed_logprobs",  # at the sampling temperature
                seed=0,
            )

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, kept: PrefixCache | None = None
    ) -> list[SampledText]:
        import vllm

        if self.engine is None:
            self.engine = self._started()
        weights = list(self.model.state_dict().items())
        self.engine.apply_model(lambda model: model.load_weights(iter(weights)))
        self.engine.reset_prefix_cache()
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        settings = [
            vllm.SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=request.key & 0x7FFFFFFF,
                stop_token_ids=list(sampling.end_ids),
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        outputs = self.engine.generate(prompts, settings, use_tqdm=False)
        return [_completion(output.outputs[0], sampling) for output in outputs]


def _completion(output: Any, sampling: Sampling) -> SampledText:
    ids = list(output.token_ids)
    log_probs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
    # The expected negative log-probability of a token is the entropy of its distribution.
    return SampledText(ids, log_probs, -sum(log_probs), ids[-1] in sampling.end_ids)
