"""Tensors don't get their dtype from torch's default, which Lightning sets to half under bf16-true and 16-true.

It does so in every training, validation and prediction step, whatever is computed there: times of masked diffusion
would be drawn in steps of 1/256.
"""

import ast

import pytest

from test_rooms import SOURCE, nodes

# Factories whose dtype is the default one if none is given, and those where it is for floating-point values.
ALWAYS = {"zeros", "ones", "empty", "rand", "randn", "linspace", "logspace", "eye", "normal", "complex", "Tensor"}
OF_FLOATS = {"tensor", "as_tensor", "full", "scalar_tensor"}


def undecided(tree: list[ast.AST]) -> list[int]:
    """Returns the lines of calls of torch's factories without a dtype.

    A module's new parameter follows the default as in every torch module: `nn.Parameter(torch.zeros(4))`. `arange`,
    `randint` and `randperm` give int64 for integers.
    """
    calls = [node for node in tree if isinstance(node, ast.Call)]
    parameters = {id(inner) for call in calls if ast.unparse(call.func) == "nn.Parameter" for inner in ast.walk(call)}
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and (call.func.attr in ALWAYS | OF_FLOATS or (call.func.attr == "arange" and has_floats(call)))
        and not any(keyword.arg in ("dtype", "out") for keyword in call.keywords)
        and id(call) not in parameters
    ]


def has_floats(call: ast.Call) -> bool:
    """Returns whether an argument has a float or a division in it."""
    parts = [part for argument in call.args for part in ast.walk(argument)]
    return any(isinstance(part, ast.Div) or isinstance(getattr(part, "value", None), float) for part in parts)


def test_every_tensor_states_its_dtype() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}" for path in sorted(SOURCE.rglob("*.py")) for line in undecided(nodes(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("torch.zeros(3)", True),
        ("torch.zeros(3, device=x.device)", True),
        ("torch.rand((), dtype=torch.float32)", False),
        ("torch.tensor([1.0, 2.0])", True),
        ("torch.full((2,), x)", True),
        ("torch.arange(3)", False),
        ("torch.arange(3, device=x.device)", False),
        ("torch.arange(0.0, 1.0, 0.1)", True),
        ("torch.arange(n / 2)", True),
        ("nn.Parameter(torch.empty(3).normal_())", False),
        ("torch.zeros_like(x)", False),
        ("x.new_zeros(3)", False),
    ],
)
def test_what_takes_the_default_dtype_is_found(code: str, is_found: bool) -> None:
    assert bool(undecided(list(ast.walk(ast.parse(code))))) is is_found
