"""Shows the data as the model sees it: `python -m lmtrain.inspect objective=sft data=chat_jsonl data.path=a.jsonl`."""

import sys

from lmtrain import cli

main = cli.door("inspect", "lmtrain.reports.inspection:inspect", "loading torch and transformers")


if __name__ == "__main__":
    sys.exit(main())
