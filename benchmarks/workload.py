"""Inputs of the fine-tuning benchmarks: conversations or pairs, a model and a tokenizer, written to a folder.

Without `--data` and `--model` everything is generated, with conversations about as long as real ones: turns and
words are drawn so that the lengths in tokens spread like those of the Schema-Guided Dialogue dataset under SmolLM2's
tokenizer (deciles 201 and 533, quartiles 269 and 443, mean 365).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Row = dict[str, Any]
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip

# ChatML as TRL needs it: TRL has no template of that name and requires {% generation %}.
MARKED_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
        {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def read_rows(path: Path, count: int) -> list[Row]:
    """Reads the rows of a .parquet or .jsonl file, or of the .parquet files in a folder."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    found: list[Row] = []
    for file in files:
        if file.suffix == ".jsonl":
            found += [json.loads(line) for line in file.read_text().splitlines()]
        else:
            import pyarrow.parquet as parquet

            found += parquet.read_table(file).to_pylist()
    if not found:
        raise SystemExit(f"{path} holds no rows: name a .jsonl or .parquet file, or a folder with .parquet files")
    return found[:count]


def made_conversations(count: int) -> list[Row]:
    random = np.random.default_rng(0)
    return [{"messages": _turns(random, int(random.integers(4, 13)))} for _ in range(count)]


def made_pairs(count: int) -> list[Row]:
    """Generates pairs: a prompt of several turns, and two answers of different lengths."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        turns = _turns(random, int(random.integers(1, 4)))[:-1]
        chosen, rejected = (
            [{"role": "assistant", "content": _words(random, int(random.gamma(2, 60)) + 1)}] for _ in range(2)
        )
        rows.append({"prompt": turns, "chosen": chosen, "rejected": rejected})
    return rows


def _turns(random: np.random.Generator, exchanges: int) -> list[dict[str, str]]:
    turns = []
    for _ in range(exchanges):
        turns.append({"role": "user", "content": _words(random, int(random.gamma(2, 2.7)) + 1)})
        turns.append({"role": "assistant", "content": _words(random, int(random.gamma(2, 2.7)) + 1)})
    return turns


def _words(random: np.random.Generator, count: int) -> str:
    return " ".join(f"word{number}" for number in random.zipf(1.3, count) % 900)


def write_model(folder: Path, shape_of: Path | None, rows: list[Row], dtype: torch.dtype = torch.float32) -> None:
    """Writes a model of random weights (speed doesn't depend on them), of the shape in `shape_of` or a small Llama."""
    if shape_of is None:
        talks = (turns for row in rows for turns in row.values() if isinstance(turns, list))
        texts = (turn["content"] for turns in talks for turn in turns)
        tokenizer = chatml_tokenizer(texts, vocab_size=4096)
        shape = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    else:
        tokenizer, shape = AutoTokenizer.from_pretrained(shape_of), AutoConfig.from_pretrained(shape_of)
    disable_progress_bar()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a billion weights are drawn at once on a GPU
        AutoModelForCausalLM.from_config(shape, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_shape(folder: Path, shape: dict[str, Any] = LLAMA_1B) -> Path:
    """Writes config and tokenizer, by default for the shape of Llama 3.2 1B; the tokenizer has few tokens."""
    texts = (turn["content"] for row in made_conversations(200) for turn in row["messages"])
    tokenizer = chatml_tokenizer(texts, vocab_size=4096)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    LlamaConfig(**shape, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chatml_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE on these texts, with ChatML's special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=CHATML_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    pad, start, end = CHATML_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=start, eos_token=end, pad_token=pad)
