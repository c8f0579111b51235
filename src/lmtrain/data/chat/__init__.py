"""Conversations, pairs, chat templates and label masks; `TABLES` are the names that tables.yaml lists."""

from typing import Any

from lmtrain.config import safe_yaml

TABLES: dict[str, Any] = safe_yaml.table(__file__, "tables.yaml")
