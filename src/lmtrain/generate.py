"""Text from a trained model: `python -m lmtrain.generate run_dir=outputs/my_run generate.prompt="def main"`."""

import sys

from lmtrain import cli, errors
from lmtrain.errors import UserError
from lmtrain.schema import Config


def generate(config: Config) -> int:
    """Prints generate.num_samples continuations of generate.prompt."""
    from lmtrain import trained
    from lmtrain.build import quiet_libraries
    from lmtrain.generation import sample_text

    quiet_libraries()
    if config.run_dir is None:
        raise UserError("which model? set run_dir=outputs/<name>, an exported folder or a hub name")
    g = config.generate
    model, tokenizer = trained.load(config.run_dir, g.checkpoint)
    for i in range(g.num_samples):
        text = sample_text(
            model,
            tokenizer,
            g.prompt,
            max_new_tokens=g.max_new_tokens,
            temperature=g.temperature,
            top_k=g.top_k,
            seed=config.seed + i,
        )
        print(f"--- {i + 1}\n{g.prompt}{text}" if g.num_samples > 1 else f"{g.prompt}{text}")
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    return cli.run("generate", generate, argv)


if __name__ == "__main__":
    sys.exit(main())
