"""Text from a trained model: `python -m lmtrain.generate run_dir=outputs/my_run generate.prompt="def main"`."""

import sys
from typing import Any

from lmtrain import cli, errors, terminal
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.errors import UserError


def generate(config: Config) -> int:
    """Prints generate.num_samples continuations of generate.prompt, or answers to it; of many prompts JSON lines."""
    terminal.status.say("loading torch, transformers and the model")
    from lmtrain.config.override_text import typed_keys
    from lmtrain.distributed.ranks import typed
    from lmtrain.outputs.generation import positions, sample_text
    from lmtrain.run import subject, trained
    from lmtrain.run.quiet import quiet_libraries

    quiet_libraries()
    if config.run_dir is None:
        raise UserError("which model? set run_dir=outputs/<name>, an exported folder or a hub name")
    g = config.generate
    model, tokenizer = trained.load(config.run_dir, g.checkpoint, trust.granted(config))
    subject.place(model, config.trainer.accelerator)
    terminal.status.stop()
    if g.max_new_tokens >= positions(model) and "generate.max_new_tokens" in typed_keys(typed()):
        print(
            f"generate.max_new_tokens={g.max_new_tokens}: the model has {positions(model)} positions for the prompt "
            f"and its continuation together: of the prompt the last token is read, {positions(model) - 1} are written",
            file=sys.stderr,
        )
    if g.prompts_file is not None:
        return many(model, tokenizer, config)
    prompt, end_ids = as_conversation(tokenizer, config, g.prompt)
    for i in range(g.num_samples):
        text = sample_text(
            model,
            tokenizer,
            prompt,
            max_new_tokens=g.max_new_tokens,
            temperature=g.temperature,
            top_k=g.top_k,
            seed=config.seed + i,
            end_ids=end_ids,
        )
        whole = text if end_ids is not None else f"{g.prompt}{text}"
        print(f"--- {i + 1}\n{whole}" if g.num_samples > 1 else whole)
    return errors.FINISHED


def many(model: Any, tokenizer: Any, config: Config) -> int:
    """Answers of generate.prompts_file in batches: {"prompt", "sample", "text"}, a line each, in order."""
    from lmtrain.outputs.generation import sample_texts
    from lmtrain.outputs.prompt_file import Answers, read_prompts

    g, answers = config.generate, Answers(config.generate.out, config.generate.batch_size)
    asked = [(prompt, i) for prompt in read_prompts(str(g.prompts_file)) for i in range(g.num_samples)]
    for start in range(answers.done, len(asked), g.batch_size):
        batch = asked[start : start + g.batch_size]
        given = [as_conversation(tokenizer, config, prompt) for prompt, _ in batch]
        texts = sample_texts(
            model,
            tokenizer,
            [ids for ids, _ in given],
            max_new_tokens=g.max_new_tokens,
            temperature=g.temperature,
            top_k=g.top_k,
            seed=config.seed + start,
            end_ids=given[0][1],
        )
        answers.add([{"prompt": p, "sample": i, "text": t} for (p, i), t in zip(batch, texts, strict=True)])
    return errors.FINISHED


def as_conversation(tokenizer: Any, config: Config, prompt: str) -> tuple[str | list[int], list[int] | None]:
    """The prompt as a user's turn and the tokens that end an answer; with generate.chat=false itself, and None."""
    from lmtrain.data.chat.templates import end_ids, own_template, user_turn

    g = config.generate
    if g.chat is False or (g.chat == "auto" and not (prompt and tokenizer.chat_template)):
        return prompt, None
    template = own_template(tokenizer)
    if template is None or not prompt:
        lacking = "the tokenizer has no chat template" if template is None else "generate.prompt is empty"
        raise UserError(f"generate.chat=true: {lacking}; continue a text with generate.chat=false")
    return user_turn(tokenizer, template, prompt, g.system_prompt), end_ids(tokenizer, template)


def main(argv: list[str] | None = None) -> int:
    return cli.run("generate", generate, argv)


if __name__ == "__main__":
    sys.exit(main())
