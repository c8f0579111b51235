"""Table (best trial first) and plot of a sweep's trials: `python -m lmtrain.sweep_report outputs/sweeps/my_sweep`."""

from lmtrain import cli

main = cli.folder_door("sweep_report", "lmtrain.sweeps.report:report", "a folder such as outputs/sweeps/my_sweep")
cli.run_as_program(__name__, main)
