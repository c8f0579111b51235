"""A reward model as a reward: its score of the prompt's conversation with the completion as the last answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from lmtrain.adapters.exported import gives_rewards
from lmtrain.adapters.trainable import base_identity
from lmtrain.data import framing, hub, tokenizers
from lmtrain.data.chat.pairs import bare_turns
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError, first_line
from lmtrain.models.folder import export_of, from_pretrained
from lmtrain.models.scalar_head import says_scalar_head, scores_of, set_padding
from lmtrain.rewards.base import Reward


class ModelReward(Reward):
    """The score of a frozen model on the training device; text goes through its own chat template, if it has one."""

    def __init__(self, name_or_path: str | None = None, batch_size: int = 16) -> None:
        """
        Args:
            name_or_path: a run of objective=reward, its export, or a model name on the hub.
            batch_size: number of completions scored at once.

        Raises:
            UserError: there is no such model, or it has no head that gives one number.
        """
        if not name_or_path:
            raise UserError("reward=model needs a reward model: set reward.name_or_path=NAME (run, folder, hub name)")
        self.folder, self.batch_size = export_of(str(name_or_path)), batch_size
        self.model, self.tokenizer = load(self.folder, f"reward.name_or_path={name_or_path}")

    def place(self, device: torch.device) -> None:
        self.model.to(device)

    def content(self) -> str:
        return base_identity(self.model, self.folder, whole=None)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        rows = [self._ids(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        found: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            found += scores_of(self.model, rows[start : start + self.batch_size]).tolist()
        return found

    def _ids(self, prompt: Any, completion: str) -> list[int]:
        """Returns the conversation's token ids; raises ValueError if there are more than the model has positions."""
        if self.tokenizer.chat_template is None and isinstance(prompt, str):
            ids = framing.text_ids(self.tokenizer, f"{prompt}{completion}")
            ids = ids if self.tokenizer.eos_token_id is None else framing.ended(ids, self.tokenizer)
        else:
            turns = [*asked(prompt), {"role": "assistant", "content": completion}]
            text = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and len(ids) > most:
            raise ValueError(f"prompt and completion have {len(ids)} tokens, and the reward model {most} positions")
        return ids


def asked(prompt: Any) -> list[dict[str, Any]]:
    """Returns the turns of a prompt, without the assistant's turns at its end."""
    try:
        turns = bare_turns(prompt, "the prompt")
    except BadRow as error:
        raise ValueError(error.reason) from None
    while turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return turns


def load(name: str, key: str) -> tuple[PreTrainedModel, Any]:
    """Loads a frozen model with a scalar head, and its tokenizer, without running code that comes with it."""
    # If the hub doesn't answer, a cached copy may do.
    offline = not Path(name).is_dir() and hub.commit_of("model", name, None)[0] is None
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": offline}
    try:
        model = _load(name, options)
        tokenizer = tokenizers.usable(AutoTokenizer.from_pretrained(name, **options))
        tokenizers.completed(tokenizer, name, local_files_only=offline)
    except UserError:
        raise
    except Exception as error:  # the hub's, transformers' and safetensors' errors share no base class
        if "trust_remote_code" in str(error):
            raise UserError(f"{key} brings its own code, which a reward model may not run: choose another") from error
        raise UserError(f"{key} can't be loaded ({type(error).__name__}: {first_line(error)})") from error
    if model is None:
        raise UserError(f"{key} has no scalar head (num_labels=1), so it gives no reward: see objective=reward")
    set_padding(model, tokenizer)
    return model.eval().requires_grad_(False), tokenizer


def _load(name: str, options: dict[str, Any]) -> PreTrainedModel | None:
    """Loads the model, or returns None if it has another head."""
    if (Path(name) / "adapter_config.json").exists():
        from lmtrain.adapters.lora_files import load_adapter

        return load_adapter(Path(name), weights_only=True) if gives_rewards(Path(name)) else None
    config = AutoConfig.from_pretrained(name, **options)
    if not says_scalar_head(config) or config.num_labels != 1:
        return None
    return from_pretrained(name, config=config, dtype="auto", weights_only=True, **options)
