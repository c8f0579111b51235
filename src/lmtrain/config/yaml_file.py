"""YAML as users write it: plain values only, and a key that stands twice is refused, where PyYAML keeps the last."""

from typing import Any

import yaml

from lmtrain.config import strangers
from lmtrain.errors import UserError


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(f"the key {key.value} stands in line {lines[key.value]} and in line {line}")
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def parse(text: str, where: str) -> Any:
    """The plain values of a YAML text; UserError, which begins with `where`, for one that can't be read."""
    strangers.check_text(text, where)
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of dates
        raise UserError(f"{where} can't be read: {' '.join(str(error).split())}") from None
