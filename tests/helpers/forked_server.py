"""What each process of forked.py would import and read anew, imported once by the server that they are forked from."""

import composed_once
import lmtrain.objectives.causal_lm
import lmtrain.run.session
import lmtrain.run.start
import lmtrain.train  # noqa: F401
from lmtrain.config import compose

composed_once.install()
compose.check(compose.compose(["data=text", "data.path=.", "tokenizer=bytes", "logger=none"]))
