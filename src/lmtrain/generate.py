"""Text from a trained model: `python -m lmtrain.generate run_dir=outputs/my_run generate.prompt="def main"`."""

import sys

from lmtrain import cli, terminal
from lmtrain.config.schema import Config


def generate(config: Config) -> int:
    """Prints generate.num_samples continuations of generate.prompt, or answers to it; of many prompts JSON lines."""
    terminal.status.say("loading torch, transformers and the model")
    from lmtrain.generation import generate

    return generate.generate(config)


main = cli.main_of("generate", generate)


if __name__ == "__main__":
    sys.exit(main())
