"""Entry point of `python -m lmtrain VERB [overrides]`, the same as `lmtrain VERB`."""

from lmtrain.cli import program

if __name__ == "__main__":
    program()
