"""Adds to pyproject.toml: conf/ inside the wheel, and the addresses of the code host that builds a release."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class ConfInWheel(BuildHookInterface):
    """Puts conf/ inside the package, so that it is found from any folder.

    An editable install reads conf/ of the checkout, and a copy in site-packages would only grow old.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and version != "editable":
            build_data["force_include"]["conf"] = "lmtrain/conf"


class HostAddresses(MetadataHookInterface):
    """Names the project's pages, and makes README's links absolute for the package index, which has no docs/ beside it.

    The addresses are those of the code host that builds the release (GITHUB_SERVER_URL, GITHUB_REPOSITORY,
    GITHUB_REF_NAME). A build elsewhere has no addresses, and README as it stands.
    """

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("GITHUB_REPOSITORY")
        if repository:
            home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
            files = f"{home}/%s/{os.environ.get('GITHUB_REF_NAME', 'main')}/"
            text = re.sub(r'src="(?!https?:)', f'src="{files % "raw"}', text)
            text = re.sub(r"\]\((?!https?:|#)", f"]({files % 'blob'}", text)
            owner, _, name = repository.partition("/")
            metadata["urls"] = {
                "Documentation": f"https://{owner}.github.io/{name}/",
                "Source": home,
                "Issues": f"{home}/issues",
                "Changelog": f"{files % 'blob'}CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
