"""Lists the runs under a folder: `python -m lmtrain.runs [outputs]`. Only reads their files; loads no models."""

import sys

from lmtrain import cli

main = cli.folder_door("runs", "lmtrain.reports.listing:show", "where to look (outputs)", "outputs")


if __name__ == "__main__":
    sys.exit(main())
