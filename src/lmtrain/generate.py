"""Text from a trained model: `python -m lmtrain.generate run_dir=outputs/my_run generate.prompt="def main"`."""

import sys
from typing import Any

from lmtrain import cli, errors
from lmtrain.errors import UserError
from lmtrain.schema import Config


def generate(config: Config) -> int:
    """Prints generate.num_samples continuations of generate.prompt, or answers to it."""
    from lmtrain import trained
    from lmtrain.build import quiet_libraries
    from lmtrain.generation import sample_text

    quiet_libraries()
    if config.run_dir is None:
        raise UserError("which model? set run_dir=outputs/<name>, an exported folder or a hub name")
    g = config.generate
    model, tokenizer = trained.load(config.run_dir, g.checkpoint)
    prompt, end_ids = as_conversation(tokenizer, config)
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


def as_conversation(tokenizer: Any, config: Config) -> tuple[str | list[int], list[int] | None]:
    """generate.prompt as a user's turn and the tokens that end an answer; with generate.chat=false itself, and None."""
    from lmtrain.data.chat_templates import end_ids, own_template, user_turn

    g = config.generate
    if g.chat is False or (g.chat == "auto" and not (g.prompt and tokenizer.chat_template)):
        return g.prompt, None
    template = own_template(tokenizer)
    if template is None or not g.prompt:
        lacking = "the tokenizer has no chat template" if template is None else "generate.prompt is empty"
        raise UserError(f"generate.chat=true: {lacking}; continue a text with generate.chat=false")
    return user_turn(tokenizer, template, g.prompt, g.system_prompt), end_ids(tokenizer, template)


def main(argv: list[str] | None = None) -> int:
    return cli.run("generate", generate, argv)


if __name__ == "__main__":
    sys.exit(main())
