"""What libraries say that nobody who trains has to read."""

import logging
import warnings

import transformers


def quiet_libraries() -> None:
    """Lightning's and transformers' tips and progress bars: what matters is said by the plan, once."""
    libraries = ("lightning.pytorch", "lightning.fabric", "lightning", "transformers", "datasets", "httpx")
    for name in (*libraries, "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    # Saving a model imports DeepSpeed where it is installed, and it sets its logger's level itself.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # Nothing writes into the loss, which is an element of a larger tensor.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
