"""Shows the data as the model sees it: `python -m lmtrain.inspect objective=sft data=chat_jsonl data.path=a.jsonl`."""

from lmtrain import cli

main = cli.door("inspect", "lmtrain.reports.inspection:inspect")
cli.run_as_program(__name__, main)
