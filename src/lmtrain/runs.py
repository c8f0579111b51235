"""Lists the runs under a folder: `python -m lmtrain.runs [outputs]`. Only reads their files; loads no models."""

from lmtrain import cli

main = cli.folder_door("runs", "lmtrain.reports.listing:show", "where to look (outputs)", "outputs")
cli.run_as_program(__name__, main)
