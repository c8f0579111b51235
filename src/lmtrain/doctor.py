"""Diagnosis of this machine: `python -m lmtrain.doctor`. Exit code 1 if training could not run on it."""

from lmtrain import cli

_HERE = "where runs would be (outputs)"
main = cli.folder_door("doctor", "lmtrain.reports.machine:diagnose", _HERE, "outputs", "trying out torch and devices")
cli.run_as_program(__name__, main)
