"""What vLLM is asked for and how its answer is read, with a module in its place: no GPU has run it here."""

import math
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmtrain.errors import UserError
from lmtrain.rollouts.engine import Request, SampledText, Sampling
from lmtrain.rollouts.vllm_engine import VLLM
from tiny_pretrained import save_pretrained


class FakeLLM:
    """Answers each prompt with its own first token and the end token; log-probabilities are -1 and -2."""

    made: ClassVar[list["FakeLLM"]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.calls, self.weights = options, [], []
        self.saved = AutoModelForCausalLM.from_pretrained(options["model"]).state_dict()
        FakeLLM.made.append(self)

    def apply_model(self, change: Any) -> None:
        self.calls.append("weights")
        change(SimpleNamespace(load_weights=lambda pairs: self.weights.append({k: v.clone() for k, v in pairs})))

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def generate(self, prompts: list[Any], settings: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.calls.append("generate")
        self.asked = list(zip(prompts, settings, strict=True))
        return [SimpleNamespace(outputs=[self._output(prompt["prompt_token_ids"])]) for prompt in prompts]

    def _output(self, prompt: list[int]) -> Any:
        ids = [prompt[0], 9] if len(prompt) > 1 else [prompt[0]]
        steps = [
            {token: SimpleNamespace(logprob=-1.0 - i), 0: SimpleNamespace(logprob=-7.0)} for i, token in enumerate(ids)
        ]
        return SimpleNamespace(token_ids=tuple(ids), logprobs=steps)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "vllm", module)
    module.__spec__ = ModuleSpec("vllm", None)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.mark.usefixtures("vllm")
def test_the_trained_weights_sample_with_the_settings_of_the_rollout(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_pretrained(tmp_path / "llama"))
    engine, sampling = VLLM(model), Sampling(12, 0.7, 0.9, (9, 8))
    assert FakeLLM.made == [], "it takes its share of the device with the first rollout only"
    requests = [Request((5, 6), 2**40 + 3), Request((7,), 4)]
    found = engine.generate(requests, sampling)
    assert found == [SampledText([5, 9], [-1.0, -2.0], 3.0, True), SampledText([7], [-1.0], 1.0, False)]
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    engine.generate(requests, sampling)
    (llm,) = FakeLLM.made
    assert llm.calls == ["weights", "reset", "generate"] * 2, "what was cached is of the weights before"
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in llm.weights[1].items())
    assert not all(torch.equal(v, llm.weights[1][k]) for k, v in llm.weights[0].items())
    assert {**llm.options, "model": ""} == {
        "model": "", "skip_tokenizer_init": True, "dtype": "bfloat16", "gpu_memory_utilization": 0.3,
        "enforce_eager": True, "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs", "seed": 0,
    }  # fmt: skip
    assert not Path(llm.options["model"]).exists(), "the folder was for its start"
    (prompt, settings), (_, other) = llm.asked
    assert prompt == {"prompt_token_ids": [5, 6]}
    assert vars(settings) == {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 3, "stop_token_ids": [9, 8],
                              "logprobs": 0, "detokenize": False}  # fmt: skip
    assert other.seed == 4
    assert math.isclose(sum(found[0].log_probs), -3.0)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it is installed")
def test_without_the_package_it_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"lmtrain\[vllm\]"):
        VLLM(None)  # type: ignore[arg-type]
