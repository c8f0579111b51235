"""A run's checkpoint to a Hugging Face folder: `python -m lmtrain.export run_dir=outputs/my_run`."""

import sys
from pathlib import Path

from lmtrain import cli, errors
from lmtrain.errors import UserError
from lmtrain.schema import Config


def export(config: Config) -> int:
    """Writes <run_dir>/export from the checkpoint that export.checkpoint names."""
    import torch

    from lmtrain import config as rules
    from lmtrain import report, trained
    from lmtrain.build import quiet_libraries
    from lmtrain.data.chat_templates import end_ids, own_template
    from lmtrain.hf_folder import export_model
    from lmtrain.run_dir import RunDir

    quiet_libraries()
    if config.run_dir is None:
        raise UserError("which run? set run_dir=outputs/<name>")
    run = RunDir(Path(config.run_dir).expanduser().absolute())
    model, tokenizer, checkpoint = trained.from_run(run, config.export.checkpoint)
    chats = rules.load(run.config).objective.name != "causal_lm"
    generator = torch.Generator().manual_seed(config.seed)
    example = torch.randint(len(tokenizer), (1, 32), generator=generator)
    folder = export_model(
        model,
        tokenizer,
        run.export,
        dtype=config.export.dtype,
        run_config=run.config,
        example=example,
        merge=config.export.merge,
        eos_token_ids=end_ids(tokenizer, own_template(tokenizer)) if chats else None,
    )
    print(f"{folder}  (from {checkpoint.name}; {report.reader(folder)} reads it)")
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    return cli.run("export", export, argv)


if __name__ == "__main__":
    sys.exit(main())
