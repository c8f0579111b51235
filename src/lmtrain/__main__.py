"""Entry point of `python -m lmtrain VERB [overrides]`, the same as `lmtrain VERB`."""

import sys

from lmtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
