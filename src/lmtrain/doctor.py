"""Diagnosis of this machine: `python -m lmtrain.doctor`. Exit code 1 if training could not run on it."""

from lmtrain import cli

main = cli.folder_door("doctor", "lmtrain.reports.machine:diagnose", "where runs would be (outputs)", "outputs")
cli.run_as_program(__name__, main)
