"""The model to evaluate: from a run, an exported folder or the hub, on its device, with its origin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.files import absolute
from lmtrain.models.denoising import refuse_denoising
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.probe import check_causal
from lmtrain.models.scalar_head import has_scalar_head
from lmtrain.objectives.reference import weights_hash
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir


@dataclass
class Subject:
    """A model under evaluation; `folder` is its run's folder or None, `own` its training config or None if unknown."""

    name: str
    label: str  # usable in a file name
    model: LanguageModel
    tokenizer: Any
    tokenizer_name: str | Path  # folder or hub name from which its tokenizer is loaded
    folder: Path | None
    own: Config | None

    def identity(self) -> dict[str, Any]:
        """Returns the entries that identify the evaluated model in the results file."""
        return {"name": self.name, "checkpoint": self.label, "weights_sha256": weights_hash(self.model)}


def load(name: str, which: str, config: Config) -> Subject:
    """Loads the model `name` in evaluation mode, on the device of `config.trainer.accelerator`.

    Raises:
        UserError: the model can't be loaded (see `trained.load`), or its tokens see those that come after them.
    """
    path = Path(name).expanduser()
    own: Config | None = None
    grants = trust.granted(config)
    folder = absolute(path) if (path / "config.yaml").exists() else None
    if folder is not None:
        run = RunDir(folder)
        hf_model, tokenizer, checkpoint = trained.from_run(run, which, grants, to_read=True)
        own, label, source = rules.load(run.config, grants), checkpoint.name, run.tokenizer
    else:
        hf_model, tokenizer = trained.load(name, which, grants)
        written = path / "lmtrain_config.yaml"
        own = rules.load(written, grants) if written.exists() else None
        label, source = path.resolve().name if path.exists() else name.replace("/", "-"), Path(name)
    refuse_denoising(hf_model, "an evaluation")
    if not has_scalar_head(hf_model):
        check_causal(hf_model, "an evaluation")
    trained.place(hf_model, config.trainer.accelerator)
    model = LanguageModel(hf_model).eval()
    return Subject(name, label, model, tokenizer, source if path.exists() else name, folder, own)
