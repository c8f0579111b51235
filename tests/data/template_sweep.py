"""Chat templates that models ship, from installed packages, and conversations of every kind to try them with."""

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lmtrain.data.chat import jinja_rendering
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.find_template import NAMED
from lmtrain.data.tokenizers import load_folder, load_or_train
from loopback_hub import HUB
from support import REPO

Turns = list[dict[str, Any]]
# Strings that are a single special token in the tokenizers of these models.
_SPECIAL = re.compile(
    r"<[|｜][^<>{}'\s]*>|<[^<>{}'\s|/]*\|>|<[A-Z_]+_TOKEN>|</?s>|<(?:start|end)_of_turn>|<end_of_utterance>|<sop>"
    r"|\[/?(?:INST|gMASK|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\]"
)
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "The city."}},
    "required": ["city"]}}}]  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Rule zero."}
RESULT = {"role": "tool", "content": "Result of a tool.", "name": "weather", "tool_call_id": "call00001"}
CHATS: dict[str, Conversation] = {
    name: Conversation(turns, tools, "chats.jsonl, line 1", given)
    for name, turns, tools, given in [
        ("single", [user("Ask one."), says("Say one.")], None, 0),
        ("turns", [user("Ask one."), says("Say one."), user("Ask two."), says("Say two.")], None, 0),
        ("system", [SYSTEM, user("Ask one."), says("Say one.")], None, 0),
        ("unanswered", [user("Ask one."), says("Say one."), user("Ask two.")], None, 0),
        ("thoughts", [user("Ask one."), says("Say one.", reasoning_content="Think one."), user("Ask two."),
                      says("Say two.", reasoning_content="Think two.")], None, 0),
        ("think_blocks", [user("Ask one."), says("<think>\nThink one.\n</think>\n\nSay one."), user("Ask two."),
                          says("<think>\nThink two.\n</think>\n\nSay two.")], None, 0),
        ("tools", [user("Ask one."), says("", tool_calls=[CALL]), RESULT, says("Say two.")], TOOLS, 0),
        ("more_tools", [SYSTEM, user("Ask one."), says("Say one.", tool_calls=[CALL]), RESULT, says("Say two."),
                        user("Ask two."), says("Say three.")], TOOLS, 0),
        ("few_shot", [user("Ask one."), says("Say one."), user("Ask two."), says("Say two.")], None, 3),
    ]
}  # fmt: skip


@functools.cache
def trl_templates() -> dict[str, str]:
    """Returns the templates that TRL ships, models' own and its training variants; {} if TRL is not installed."""
    python = Path(os.environ.get("LMTRAIN_TRL_PYTHON", REPO / ".venv-trl" / "bin" / "python"))
    if not python.exists():
        return {}
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    done = subprocess.run([str(python), "-c", find], capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip()) / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def trl_template(name: str) -> str:
    if name not in trl_templates():
        pytest.skip(f"needs {name}.jinja of TRL in an environment of its own: make env-trl")
    return trl_templates()[name]


def every_template() -> dict[str, str]:
    """Returns the templates of TRL, of lmtrain and of the hub's models by name."""
    ours = Path(jinja_rendering.__file__).parent / "jinja"
    found = {**trl_templates(), **{f"ours_{n}": (ours / f"{n}.jinja").read_text(encoding="utf-8") for n in NAMED}}
    for file in sorted((HUB / "models").glob("*/*/tokenizer.json")):
        text = load_folder(file.parent).chat_template
        found |= {f"hub_{file.parent.name}": text} if text else {}
    return found


def tokenizer_for(text: str, make: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes (each byte is its own id) and of the special tokens that the template writes."""
    tokenizer = load_or_train(make("bytes"), lambda _: iter(()))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(_SPECIAL.findall(text)))})
    tokenizer.chat_template = text
    return tokenizer
