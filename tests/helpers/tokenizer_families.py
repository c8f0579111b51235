"""Small tokenizers in the styles of a dozen families: how each begins a text, ends one, and writes its spaces."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers

_TEXT = [
    "def f(x):\n    return x\n",
    "the king went home, and the queen too.",
    "once upon a time there was a line",
    "äöü 日本",
]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} "
    "[/INST]{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else "
    "message['role'] }}\n{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% else %}<｜Assistant｜>{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# kind of spaces, special tokens, what is put before a text, the chat template, and more of tokenizer_config.json
_STYLES: dict[str, dict[str, Any]] = {
    "gpt2": {"special": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}},
    "llama2": {"spaces": "dummy", "special": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
               "begins": "<s>", "add_bos_token": True},
    "llama3": {"special": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
               "more": ["<|start_header_id|>", "<|end_header_id|>"], "begins": "<|begin_of_text|>", "chat": LLAMA3},
    "opt": {"special": {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}, "begins": "</s>"},
    "qwen": {"special": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, "more": ["<|im_start|>"],
             "chat": CHATML, "add_bos_token": False},
    "gemma": {"spaces": "marked", "special": {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
              "more": ["<start_of_turn>", "<end_of_turn>"], "begins": "<bos>", "chat": GEMMA},
    "phi3": {"spaces": "dummy", "special": {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"},
             "more": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"], "chat": PHI, "add_bos_token": False},
    "deepseek": {"special": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
                 "more": ["<｜User｜>", "<｜Assistant｜>"], "chat": DEEPSEEK, "add_bos_token": True},
    "mistral": {"spaces": "dummy", "special": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
                "more": ["[INST]", "[/INST]"], "begins": "<s>", "chat": MISTRAL},
    "smollm2": {"special": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
                "chat": CHATML},
    "glm": {"special": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
            "more": ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"], "begins": "[gMASK] <sop>",
            "chat": GLM},
}  # fmt: skip
FAMILIES = (*_STYLES, "bytes", "bpe")


def _backend(spaces: str) -> Backend:
    """Trains a tiny BPE: over bytes, or over characters with "▁" for spaces and bytes as a fallback."""
    if spaces == "bytes":
        made = Backend(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(
            _TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        )
        return made
    learned = Backend(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split(Regex("(?<!▁)(?=▁)"), "isolated")
    learned.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(learned.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    start = [normalizers.Prepend("▁")] if spaces == "dummy" else []
    made.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if spaces == "dummy" else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made


@functools.cache
def _files(family: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _make(family, Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _make(family: str, folder: Path) -> None:
    if family in ("bytes", "bpe"):
        cfg = TokenizerConfig(kind=family, vocab_size=280, min_frequency=1)
        tokenizers.save(tokenizers.load_or_train(cfg, lambda _: iter(_TEXT), tokenizers.identity(cfg)), folder)
        return
    style = _STYLES[family]
    backend = _backend(style.get("spaces", "bytes"))
    special = dict.fromkeys([*style["special"].values(), *style.get("more", [])])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if "begins" in style:
        ids = [(token, backend.token_to_id(token)) for token in style["begins"].split()]
        template = processors.TemplateProcessing(
            single=f"{style['begins']} $A", pair=f"{style['begins']} $A {style['begins']} $B", special_tokens=ids
        )
        spaced = style.get("spaces", "bytes") != "bytes"
        backend.post_processor = template if spaced else processors.Sequence([backend.post_processor, template])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=style.get("chat"),
        clean_up_tokenization_spaces=False,
        **style["special"],
    )
    made.save_pretrained(folder)
    if "add_bos_token" in style:  # transformers leaves it out when it saves; the hub's files have it
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": style["add_bos_token"]}))


def save_family(family: str, folder: Path) -> Path:
    """Writes the tokenizer files of a family into a folder, as its models on the hub have them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(family).items():
        (folder / name).write_bytes(content)
    return folder


def load_family(family: str, folder: Path) -> Any:
    """Returns the tokenizer of a family as lmtrain loads it from `folder`, where it is saved."""
    cfg = TokenizerConfig(kind="hub", name_or_path=str(save_family(family, folder)))
    return tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
