"""What `lmtrain export` does: a Hugging Face folder from a checkpoint of a run that has ended."""

from pathlib import Path

import torch

from lmtrain import errors, terminal
from lmtrain.adapters.trainable import adapter_of
from lmtrain.checkpoints import store
from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.data.chat.templates import end_ids, own_template
from lmtrain.errors import UserError
from lmtrain.exports import hub_upload, model_card
from lmtrain.exports.hf_folder import check_memory, export_model
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from lmtrain.terminal import quiet_libraries


def export(config: Config) -> int:
    """Writes <run_dir>/export, or export_merged, from the checkpoint that export.checkpoint names."""
    quiet_libraries()
    hub_upload.check(config.export)
    if config.run_dir is None:
        raise UserError("which run? set run_dir=outputs/<name>")
    grants = trust.granted(config)
    run = RunDir(Path(config.run_dir).expanduser().absolute())
    model, tokenizer, checkpoint = trained.from_run(run, config.export.checkpoint, grants)
    chats = rules.load(run.config, grants).data.rows != "text"
    generator = torch.Generator().manual_seed(config.seed)
    example = torch.randint(len(tokenizer), (1, 32), generator=generator)
    check_memory(model, config.export.merge)
    if config.export.merge and adapter_of(model) is None:
        raise UserError(f"export.merge=true has no effect here: {run.path} trained no adapter, so leave it out")
    merge = config.export.merge
    folder = export_model(
        model,
        tokenizer,
        run.export_merged if merge else run.export,
        dtype=config.export.dtype,
        run_config=run.config,
        example=example,
        merge=merge,
        eos_token_ids=end_ids(tokenizer, own_template(tokenizer)) if chats else None,
        generation=config.export.generation,
        step=store.step_of(checkpoint),
    )
    terminal.status.stop()
    print(terminal.visible(f"{folder}  (from {checkpoint.name}; {model_card.reader(folder)} reads it)"))
    if config.export.push_to is not None:
        print(f"uploaded to {hub_upload.push(folder, config.export, f'{run.path.name}, {checkpoint.name}')}")
    return errors.FINISHED
