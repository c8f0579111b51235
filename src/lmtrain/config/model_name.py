"""model.name is only shown: whoever sets it meant an option of `model`, or a model of the hub."""

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from lmtrain.errors import UserError


def check(overrides: list[str], folders: list[Path], compose_model: Callable[[list[str]], DictConfig]) -> None:
    """Raises UserError where model.name is set to another than that of the model chosen; of one's own class it is free.

    Args:
        folders: of options.
        compose_model: the section that some overrides make.
    """
    typed = [o.partition("=")[2].strip("'\"") for o in overrides if o.lstrip("+").startswith("model.name=")]
    if not typed:
        return
    model = compose_model([o for o in overrides if not o.lstrip("+").startswith("model.name=")])
    if "_target_" in model or typed[-1] == model.get("name"):
        return
    options = sorted({file.stem for folder in folders for file in (folder / "model").glob("*.yaml")})
    found = f"model.name={typed[-1]} changes nothing but what is shown: the model stays {model.get('name')}. "
    if typed[-1] in options:
        raise UserError(f"{found}Choose model={typed[-1]}")
    scratch = ", ".join(name for name in options if name not in ("base", "pretrained"))
    raise UserError(
        f"{found}For a model of the hub or of a folder set model=pretrained model.name_or_path={typed[-1]}; from "
        f"scratch choose one of model={scratch}"
    )
