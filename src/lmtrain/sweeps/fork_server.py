"""Imported by the process that trials are forked from, and by nothing else: all that a run imports, and how it ends.

It ends when the sweep does, however that one ended; the trials, its children, are asked to save then. In a session of
its own: signals of the terminal and of a scheduler are the sweep's to answer.
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
