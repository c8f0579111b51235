"""Trains language models with PyTorch Lightning and Hydra.

In Python, `lmtrain.compose(overrides)` returns a config and `lmtrain.build(config)` a run (run/python.py);
`lmtrain.TextDataModule` and `lmtrain.ChatDataModule` read data for any LightningModule (data/modules.py). They are
imported on first use, so `import lmtrain` alone is fast.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmtrain.data.modules import ChatDataModule, TextDataModule
    from lmtrain.run.python import build, compose

__all__ = ["ChatDataModule", "TextDataModule", "build", "compose"]
__version__ = "0.2.0"

# transformers imports torchao if it is installed, which warns about kernels that it can't load and lmtrain doesn't use.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name in __all__:
        if name.endswith("DataModule"):
            from lmtrain.data import modules

            return getattr(modules, name)
        from lmtrain.run import python

        return getattr(python, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
