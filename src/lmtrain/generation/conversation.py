"""The `lmtrain chat` command: a conversation in the model's own chat template, with streamed answers."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

from lmtrain import errors
from lmtrain.config.schema import Config, GenerateConfig
from lmtrain.data import framing
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import end_ids, own_template
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError, writing
from lmtrain.files import json_line
from lmtrain.generation.sampling import continued, positions, prompt_tokens, sampling
from lmtrain.models.denoising import refuse_denoising
from lmtrain.run_folder import trained
from lmtrain.terminal import quiet_libraries, visible

_INCOMPLETE = "\ufffd"  # what bytes that are no whole character are decoded to
_ENOUGH = 64  # tokens that are decoded again with each new one


class Streamer(BaseStreamer):
    """Passes an answer to `write` token by token; the pieces together are its whole text.

    A token alone may decode otherwise than behind others (SentencePiece leaves out the space it begins with), so each
    piece is what the text has grown by. Characters of which only some bytes are there wait for the rest.

    Args:
        given: the ids before the answer.

    Attributes:
        text: the answer so far.
    """

    def __init__(self, decoder: AnswerDecoder, write: Callable[[str], None], given: Sequence[int] = ()) -> None:
        self.decoder, self.write, self.given = decoder, write, list(given)
        self.text = ""
        self._ids: list[int] = []  # those after `given`,
        self._written = ""  # and the text written of them
        self._prompt_is_over = False

    def put(self, value: Any) -> None:
        """Takes the prompt first, int64 [1, T], which is not written, and then a token at a time, int64 [1]."""
        if self._prompt_is_over:
            self._ids += value.flatten().tolist()
            self._pass_on(is_last=False)
        self._prompt_is_over = True

    def end(self) -> None:
        self._pass_on(is_last=True)

    def _pass_on(self, is_last: bool) -> None:
        text = self.decoder.decode(self._ids, self.given)
        whole = text if is_last else text.rstrip(_INCOMPLETE)
        piece = whole[len(self._written) :] if whole.startswith(self._written) else ""
        self._written += piece
        self.text += piece
        self.write(piece)
        if len(self._ids) >= _ENOUGH and self._written == text:  # between two characters; keeps decoding short
            self.given = self._ids
            self._ids = []
            self._written = ""


class Talk:
    """A conversation: its turns and the model that answers. Without a chat template the model continues each text."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, settings: GenerateConfig, seed: int) -> None:
        refuse_denoising(model, "a chat")
        self.model, self.tokenizer, self.settings, self.seed = model.eval(), tokenizer, settings, seed
        self.template, self.system = own_template(tokenizer), settings.system_prompt
        if self.template is None and self.system:
            raise UserError("generate.system_prompt: the tokenizer has no chat template, so there are no turns")
        self.end_ids = end_ids(tokenizer, self.template)
        self.turns: list[dict[str, str]] = []
        self.left_out = 0  # the oldest turns, which the model can't take any more
        self.cut_by: str | None = None  # the limit that cut off the last answer

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns so far, preceded by the system turn if there is one."""
        return [*self._system_turn(), *self.turns]

    def _system_turn(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def reset(self) -> None:
        self.turns, self.left_out = [], 0

    def ask(self, text: str, write: Callable[[str], None], say: Callable[[str], None]) -> str:
        """Returns the answer to `text`, streaming it to `write`; generation stops where the model ends its turn.

        If the conversation exceeds the model's positions, the model no longer sees the oldest turns, and `say` gets a
        message when that begins. If generation fails or is interrupted, the
        conversation is restored to its state before the call.
        """
        turns, left_out = list(self.turns), self.left_out
        self.turns.append({"role": "user", "content": text})
        try:
            ids = self._prompt()
            if self.left_out and not left_out:
                say("the oldest turns are left out from here on: the model can't take more")
            answer = self._generate(ids, write)
        except BaseException:
            self.turns, self.left_out = turns, left_out
            raise
        self.turns.append({"role": "assistant", "content": answer})
        return answer

    def _prompt(self) -> list[int]:
        """Returns the ids that the model sees, and sets left_out."""
        most = positions(self.model)
        room = most - min(self.settings.max_new_tokens, most // 2)  # if positions are few, half are kept for the answer
        if self.template is None:
            ids = prompt_tokens(self.tokenizer, self.turns[-1]["content"])
            return framing.last_of(ids, max(1, room), framing.start_of(self.tokenizer))
        ids = self._ids(self.left_out)
        if len(ids) <= max(1, room):
            return ids
        # Bisection, as a page may send thousands of turns.
        fewest, most_left_out = self.left_out // 2 + 1, (len(self.turns) - 1) // 2
        while fewest < most_left_out:
            pairs = (fewest + most_left_out) // 2
            fits = len(self._ids(2 * pairs)) <= max(1, room)
            fewest, most_left_out = (fewest, pairs) if fits else (pairs + 1, most_left_out)
        ids = self._ids(2 * most_left_out)
        if len(ids) > max(1, room):
            raise UserError(f"{len(ids):,} tokens are more than the model can take: it has {most:,} positions")
        self.left_out = 2 * most_left_out
        return ids

    def _ids(self, left_out: int) -> list[int]:
        """Returns the ids of the conversation without its first turns, as the template writes it."""
        assert self.template is not None
        try:
            rendered = self.template.prompt([*self._system_turn(), *self.turns[left_out:]], None, "chat")
        except BadRow as bad:
            raise UserError(f"the chat template refuses this: {bad.reason}") from None
        ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def _generate(self, ids: list[int], write: Callable[[str], None]) -> str:
        g, seed = self.settings, self.seed + len(self.turns)
        streamer = Streamer(AnswerDecoder(self.tokenizer, self.end_ids), write, ids)
        settings = sampling(g.temperature, g.top_k, self.end_ids) | {"streamer": streamer}
        [written] = continued(self.model, self.tokenizer, [ids], g.max_new_tokens, seed, **settings)
        by_positions = positions(self.model) - len(ids) < g.max_new_tokens
        limit = f"the model's {positions(self.model):,} positions" if by_positions else "generate.max_new_tokens"
        self.cut_by = limit if written.cut and self.template is not None else None  # a text has no end to reach
        return streamer.text.strip()

    def _rows(self) -> list[dict[str, Any]]:
        """Returns the rows to save: one with the whole conversation, or one per text if there is no chat template."""
        if self.template is not None:
            return [{"messages": self.messages}]
        texts = zip(self.turns[::2], self.turns[1::2], strict=True)
        return [{"text": f"{given['content']} {answer['content']}"} for given, answer in texts]

    def save(self, file: str) -> Path:
        """Appends the conversation to a JSON-lines file (readable by data=chat_jsonl).

        Raises:
            UserError: nothing was asked yet, or writing fails.
        """
        if not self.turns:
            raise UserError("there is nothing to save yet: ask something first")
        path = Path(file).expanduser().absolute()
        with writing(str(path)), path.open("a", encoding="utf-8") as out:
            for row in self._rows():
                out.write(json_line(row))
        return path


# What can be typed: in a chat, and to a model that only continues text.
HELP, HELP_OF_TEXT = Path(__file__).with_name("chat_help.txt").read_text(encoding="utf-8").strip().split("\n\n")


def chat(config: Config) -> int:
    """Reads lines until the end of input and answers each one; lines that begin with / are commands."""
    quiet_libraries()
    if config.chat.against is not None:
        raise UserError("two models answer side by side on the page only: add --web (chat.web=true)")
    talk = Talk(*trained.load_asked(config), config.generate, config.seed)
    print(HELP if talk.template is not None else HELP_OF_TEXT, flush=True)
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return errors.FINISHED
        if line == "/exit":
            return errors.FINISHED
        try:
            turn(talk, line)
        except UserError as error:
            errors.print_error(str(error))
        except KeyboardInterrupt:
            print("\n(stopped; this turn is forgotten)", flush=True)


def turn(talk: Talk, line: str) -> None:
    """Handles one line of user input: runs a command or answers a question."""
    command, _, rest = line.partition(" ")
    if command == "/reset":
        talk.reset()
        print("(a new conversation)")
    elif command == "/system" and talk.template is None:
        print("(there are no turns: this model continues text)")
    elif command == "/system":
        talk.system = rest.strip() or None
        talk.reset()
        print("(a new conversation, with this system turn)" if talk.system else "(a new conversation)")
    elif command == "/save":
        print(f"(written: {talk.save(rest.strip() or 'chat.jsonl')})")
    elif command.startswith("/"):
        print(HELP if talk.template is not None else HELP_OF_TEXT)
    elif line:
        talk.ask(line, lambda text: print(visible(text), end="", flush=True), lambda words: print(f"({words})"))
        print(f"\n(cut off by {talk.cut_by})" if talk.cut_by else "")
