"""`python -m lmtrain VERB [overrides]`, which is `lmtrain VERB`."""

import sys

from lmtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
