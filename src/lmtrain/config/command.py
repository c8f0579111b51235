"""The command that a config comes from, which the config carries. Imports no torch."""

from dataclasses import dataclass

from lmtrain.config.override_text import typed_keys


@dataclass(frozen=True)
class Command:
    """What a config was composed from."""

    words: tuple[str, ...] = ()  # the command line as typed, or the overrides given in Python
    of_file: tuple[str, ...] = ()  # the overrides of the yaml file that it names
    notes: tuple[str, ...] = ()  # what lmtrain has added, and why, for the plan

    @property
    def typed(self) -> dict[str, str]:
        """The typed keys with their values as text."""
        return typed_keys(self.words)

    @property
    def given(self) -> dict[str, str]:
        """The keys that are typed or in the yaml file."""
        return typed_keys([*self.of_file, *self.words])
