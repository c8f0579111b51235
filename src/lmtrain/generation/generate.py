"""The `lmtrain generate` command: continues one prompt, or many prompts from a file or standard input.

Answers to many prompts are written as JSON lines; the same command resumes the file after it was killed.
"""

import fcntl
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lmtrain import errors, secrets, terminal
from lmtrain.config.schema import Config
from lmtrain.data.chat.templates import end_ids, own_template, user_turn
from lmtrain.data.sources.lines import BOM
from lmtrain.errors import UserError, reason, writing
from lmtrain.files import json_line
from lmtrain.generation.sampling import continuations, positions, sample_texts, settings_of
from lmtrain.run_folder import trained


def generate(config: Config) -> int:
    """Prints generate.num_samples continuations of, or answers to, generate.prompt; JSON lines for a prompts file."""
    terminal.quiet_libraries()
    g, (model, tokenizer) = config.generate, trained.load_asked(config)
    if g.max_new_tokens >= positions(model) and "generate.max_new_tokens" in config.command.typed:
        most = f"the model has {positions(model)} positions for the prompt and its continuation together"
        read = f"only the prompt's last token is read, and {positions(model) - 1} tokens are generated"
        print(f"generate.max_new_tokens={g.max_new_tokens}: {most}, so {read}", file=sys.stderr)
    if g.prompts_file is not None:
        return many(model, tokenizer, config)
    prompt, ends = as_conversation(tokenizer, config, g.prompt)
    for i in range(g.num_samples):
        [made] = continuations(model, tokenizer, [prompt], seed=config.seed + i, end_ids=ends, **settings_of(g))
        whole = secrets.hide(made.text if ends is not None else f"{g.prompt}{made.text}")
        print(f"--- {i + 1}\n{whole}" if g.num_samples > 1 else whole)
        if ends is not None and made.cut:  # a text has no end to reach
            print("(the answer is cut off: generate.max_new_tokens=N lets it go on)", file=sys.stderr, flush=True)
    return errors.FINISHED


def many(model: Any, tokenizer: Any, config: Config) -> int:
    """Answers generate.prompts_file in batches; writes a {"prompt", "sample", "text"} line per answer, in order."""
    g = config.generate
    asked = [(prompt, i) for prompt in read_prompts(str(g.prompts_file)) for i in range(g.num_samples)]
    answers = AnswersFile(g.out, g.batch_size, asked)
    for start in range(answers.done, len(asked), g.batch_size):
        batch = asked[start : start + g.batch_size]
        given = [as_conversation(tokenizer, config, prompt) for prompt, _ in batch]
        prompts = [ids for ids, _ in given]
        ends = next((ids for _, ids in given if ids is not None), None)  # an empty prompt is no turn and has none
        texts = sample_texts(model, tokenizer, prompts, seed=config.seed + start, end_ids=ends, **settings_of(g))
        answers.add([(prompt, i, text) for (prompt, i), text in zip(batch, texts, strict=True)])
    return errors.FINISHED


def as_conversation(tokenizer: Any, config: Config, prompt: str) -> tuple[str | list[int], list[int] | None]:
    """Returns the prompt as a user turn and the ids that end an answer; outside a chat, the prompt itself and None."""
    g = config.generate
    if g.chat is False or (g.chat == "auto" and not (prompt and tokenizer.chat_template)):
        if g.system_prompt and not tokenizer.chat_template:
            raise UserError("generate.system_prompt: the tokenizer has no chat template, so there are no turns")
        return prompt, None
    template = own_template(tokenizer)
    if template is None or not prompt:
        lacking = "the tokenizer has no chat template" if template is None else "generate.prompt is empty"
        raise UserError(f"generate.chat=true: {lacking}; continue a text with generate.chat=false")
    return user_turn(tokenizer, template, prompt, g.system_prompt), end_ids(tokenizer, template)


def read_prompts(name: str) -> Iterator[str]:
    """Yields the prompts of a text file (a line each), a .jsonl or .ndjson file ("prompt"), or stdin (-, both formats).

    Raises:
        UserError: the file can't be read, or a line of a JSON-lines file is not JSON or has no prompt.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).expanduser().read_text(encoding="utf-8")
        text = text.removeprefix(BOM)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"generate.prompts_file={name} can't be read: {reason(error)}") from None
    # Not splitlines(), which also splits at characters that a text of JSON may contain, such as U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    as_json = name.endswith((".jsonl", ".ndjson")) or (name == "-" and bool(lines) and lines[0][1].startswith("{"))
    for number, line in lines:
        yield _of_json(line, f"{name}, line {number}") if as_json else line


def _of_json(line: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UserError(f'{where} has no "prompt" that is a text')
    return row["prompt"]


def _line(prompt: str, sample: int, text: str) -> str:
    return json_line({"prompt": prompt, "sample": sample, "text": text})


class AnswersFile:
    """A JSON-lines file of answers, or standard output if there is none; `done` counts answers of an earlier command.

    A batch that a kill left incomplete is generated again as a whole, since the seed depends on the batch's start.
    """

    def __init__(self, file: str | None, batch_size: int, asked: Sequence[tuple[str, int]]) -> None:
        """
        Args:
            asked: each prompt with the number of its sample.

        Raises:
            UserError: the file can't be written, another command is writing it, or it holds anything but the first
                answers to what is asked.
        """
        self.name, self.done = file, 0
        self._file = None if file is None else self._open(Path(file).expanduser())
        if self._file is not None:
            lines = list(self._file)
            self._check(lines, asked)
            whole = [line for line in lines if line.endswith(b"\n")]
            self.done = len(whole) // batch_size * batch_size
            self._file.seek(sum(map(len, whole[: self.done])))
            self._file.truncate()

    def _check(self, lines: Sequence[bytes], asked: Sequence[tuple[str, int]]) -> None:
        """Raises UserError for a line that is neither the answer asked for at its place nor the beginning of it."""
        for number, line in enumerate(lines):
            begins = _line(*asked[number], "").removesuffix('"}\n').encode() if number < len(asked) else b"\n"
            if not line.startswith(begins) and not begins.startswith(line):
                found = f"line {number + 1} is not the answer that this command writes there"
                raise UserError(f"generate.out={self.name}: {found}: name another file")

    def _open(self, path: Path) -> BinaryIO:
        with writing(f"generate.out={self.name}"):
            path.touch()
            file = path.open("r+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends, however it ends
            except BlockingIOError:
                raise UserError(f"generate.out={path} is being written by another command: wait for it") from None
            return file

    def add(self, rows: Sequence[tuple[str, int, str]]) -> None:
        """Writes answers: the prompt, the number of its sample, the text."""
        text = "".join(_line(*row) for row in rows)
        if self._file is None:
            print(text, end="", flush=True)
            return
        with writing(f"generate.out={self.name}"):
            self._file.write(text.encode())
            self._file.flush()
