"""Conversations, pairs, chat templates and label masks; `TABLES` are the names that tables.yaml lists."""

from pathlib import Path
from typing import Any

import yaml

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
