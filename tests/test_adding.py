"""Tests how many files of lmtrain change when a feature is added, in a copy of the tree that is run as users run it.

Extensions that change no file, since the config names a user's class, are tested by tests/docs/test_extending.py
(model, schedule, data source) and tests/config/test_doors.py; features across packages by tests/run/test_features.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO

VERB = '''"""Says hello."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def hello(config: Config) -> int:
    print(f"hello, seed {config.seed}")
    return 0


main = cli.main_of("hello", hello)


if __name__ == "__main__":
    sys.exit(main())
'''


class Tree:
    """A copy of lmtrain and conf/ that a test may change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for part in ("src/lmtrain", "conf"):
            shutil.copytree(REPO / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))

    def insert(self, file: str, before: str, line: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert text.count(before) == 1, f"{file} has {text.count(before)} of {before!r}"
        path.write_text(text.replace(before, line + before))

    def changed(self) -> list[str]:
        """Returns the files of the copy that differ from lmtrain's own, without new files."""
        own = {p.relative_to(REPO) for part in ("src/lmtrain", "conf") for p in (REPO / part).rglob("*.*")}
        return sorted(
            str(p)
            for p in own
            if p.suffix in (".py", ".yaml", ".txt") and (REPO / p).read_bytes() != (self.root / p).read_bytes()
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        return subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=self.root, env=environ
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_verb_changes_one_file(tree: Tree) -> None:
    (tree.root / "src" / "lmtrain" / "hello.py").write_text(VERB)
    tree.insert("src/lmtrain/help/commands.txt", "\nverify ", "\nhello  says hello")
    assert tree.changed() == ["src/lmtrain/help/commands.txt"]
    assert tree.run("lmtrain.hello", "seed=7").stdout == "hello, seed 7\n"
    assert "says hello" in tree.run("lmtrain").stdout
    wrong = tree.run("lmtrain.hello", "seeed=7")
    assert (wrong.returncode, "seed" in wrong.stderr) == (2, True)


def test_a_key_changes_two_files(tree: Tree) -> None:
    tree.insert("conf/run/default.yaml", "quiet: false", "greeting: null # what a run says first, a word\n")
    tree.insert("src/lmtrain/config/schema.py", "    quiet: ", "    greeting: Annotated[str | None, SHOWN]\n")
    assert tree.changed() == ["conf/run/default.yaml", "src/lmtrain/config/schema.py"]
    assert "greeting: hi" in tree.run("lmtrain.train", "run.greeting=hi", "--cfg").stdout
    assert "what a run says first, a word" in tree.run("lmtrain.explain", "run.greeting").stdout
    wrong = tree.run("lmtrain.train", "run.greting=hi", "--cfg")
    assert (wrong.returncode, "run.greeting" in wrong.stderr) == (2, True)
