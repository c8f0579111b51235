"""The preload module of the process that trials are forked from, imported by nothing else: it imports all a run needs.

The process ends when the sweep does, however the sweep ended; the trials, its children, are then signalled to save. It
has its own session, because signals from the terminal and from a scheduler are handled by the sweep.
"""

import os
import signal

import lightning.pytorch
import torch
import transformers

import lmtrain.run.build
import lmtrain.run.session
from lmtrain.distributed.ranks import end_with_parent

__all__ = ["lightning", "lmtrain", "torch", "transformers"]

os.setsid()
end_with_parent(os.getppid(), signal.SIGKILL)
