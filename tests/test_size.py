"""make size counts code without blank lines, comments and docstrings, and compares packages with the last release."""

from size import code_lines, table

SOURCE = '''"""A module."""

import os  # one


def f(x):
    """Returns

    something."""
    # not code
    text = """a

    b"""
    return os.path.join(
        x,
        text,
    )
'''


def test_code_without_comments_docstrings_and_blank_lines() -> None:
    assert code_lines(SOURCE) == 9  # import, def, three lines of text, four of the return


def test_a_package_that_grew_one_that_is_new_and_one_that_is_gone() -> None:
    now, then = (
        {"data": {"code": 1_200, "tables": 30}, "new": {"pages": 2}},
        {"data": {"code": 1_000}, "old": {"code": 7}},
    )
    cells = [line.split() for line in table(now, then)]
    assert cells == [
        ["data", "1,200", "30", "0", "1,230", "+230"],
        ["new", "0", "0", "2", "2", "+2"],
        ["old", "0", "0", "0", "0", "-7"],
        ["all", "1,200", "30", "2", "1,232", "+225"],
    ]
