"""Hydra's own information about a composition (`--info`) and shell completion (`-sc query=...`)."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from hydra.errors import HydraException
from hydra.plugins.completion_plugin import CompletionPlugin, DefaultCompletionPlugin
from omegaconf.errors import OmegaConfBaseException

from lmtrain.config.compose import compose
from lmtrain.config.config_files import folders_of, hydra_over
from lmtrain.config.defaults import PARTS
from lmtrain.errors import UserError

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_TAKES_A_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--prompt", "--shell-completion", "-sc", "--trust")


def show(what: str, overrides: list[str], config_dir: str | None, config_name: str) -> None:
    """Prints Hydra's own --info: where configs come from and in which order they are merged."""
    compose(overrides, config_dir, config_name)  # reports mistakes with lmtrain's own messages
    folders, search = folders_of(config_dir, config_name)
    with hydra_over(folders) as hydra:
        hydra.show_info(what, config_name, [*search, *overrides])


def candidates(line: str, verbs: Iterable[str], flags: Iterable[str]) -> list[str]:
    """Returns the completions of the last word of `line`: verbs, flags, options of groups, keys or files.

    Args:
        line: the command line up to the cursor: `lmtrain VERB ...` or `python -m lmtrain.VERB ...`.
    """
    words = line.split()
    word = "" if line.endswith(" ") or not words else words.pop()
    if words and Path(words[0]).name.startswith("python"):
        if words[1:] == ["-m"]:
            return [name for name in (f"lmtrain.{verb}" for verb in verbs) if name.startswith(word)]
        words = words[2:]  # lmtrain.VERB is treated as `lmtrain VERB`
        words[:1] = ["lmtrain", *(w.removeprefix("lmtrain.") for w in words[:1])]
    if len(words) < 2:
        return [verb for verb in verbs if verb.startswith(word)]
    if words[-1] in _TAKES_A_VALUE:
        files = CompletionPlugin.complete_files(word if "/" in word else f"./{word}")
        return [name.removeprefix("./") for name in files]
    if word.startswith("-"):
        return [flag for flag in flags if flag.startswith(word)]
    return _of_hydra(words[2:], word)


def _of_hydra(words: list[str], word: str) -> list[str]:
    """Returns Hydra's completions (groups, options, keys) of `word`; none if the words before it don't compose."""
    given = dict(itertools.pairwise(words))
    config_dir = given.get("--config-dir", given.get("-cd"))
    config_name = given.get("--config-name", given.get("-cn", "config"))
    taken = {value for flag, value in given.items() if flag in _TAKES_A_VALUE}
    overrides = [w for w in words if not w.startswith("-") and w not in taken]
    plus = word[: len(word) - len(word.lstrip("+"))]
    try:
        folders, search = folders_of(config_dir, config_name)
        with hydra_over(folders) as hydra:
            line = " ".join([*search, *overrides, word.lstrip("+") or " "])
            found = DefaultCompletionPlugin(hydra.config_loader)._query(config_name=config_name, line=line)
    except (UserError, HydraException, OmegaConfBaseException, ValueError):
        return []
    return [plus + name for name in found if word.startswith("hydra") or not _hidden(name)]


def _hidden(name: str) -> bool:
    """Returns whether a completion is not offered: Hydra's own settings, and options that others are based on."""
    return name.startswith("hydra") or name.partition("=")[2] in PARTS


_BASH = """_lmtrain_complete() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" IFS=$'\\n'
    COMPREPLY=()
    case "$line" in
        lmtrain\\ *|*\\ -m\\ lmtrain.*|*\\ -m\\ lmt*) ;;
        *) return ;;
    esac
    COMPREPLY=($(COMP_LINE="$line" {query}=bash 2>/dev/null))
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//[=:]/}}
complete -o nospace -o default -F _lmtrain_complete lmtrain python python3
"""
_ZSH = """_lmtrain_complete() {{
    if [[ "$LBUFFER" != lmtrain\\ * && "$LBUFFER" != *\\ -m\\ lmt* ]]; then _files; return; fi
    local -a found
    found=("${{(@f)$(COMP_LINE="$LBUFFER" {query}=zsh 2>/dev/null)}}")
    compadd -Q -S '' -- $found
}}
(( $+functions[compdef] )) || {{ autoload -U compinit && compinit }}
compdef _lmtrain_complete lmtrain python python3
"""
_FISH = """function _lmtrain_complete
    set -lx COMP_LINE (commandline -cp)
    {query}=fish 2>/dev/null
end
complete -c lmtrain -f -a '(_lmtrain_complete)'
for name in python python3
    complete -c $name -n 'string match -q -- "* -m lmt*" (commandline -cp)' -f -a '(_lmtrain_complete)'
end
"""
_INSTALL = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_UNINSTALL = {
    "bash": "complete -r lmtrain python python3; unset -f _lmtrain_complete\n",
    "zsh": "compdef -d lmtrain python python3; unfunction _lmtrain_complete\n",
    "fish": "complete -e -c lmtrain; complete -e -c python; complete -e -c python3; functions -e _lmtrain_complete\n",
}


def shell_code(asked: str, query: str) -> str:
    """Returns the shell code that installs or removes completion, to be evaluated by the shell.

    Args:
        asked: install=SHELL or uninstall=SHELL, where SHELL is bash, zsh or fish.
        query: the command that prints the completions of $COMP_LINE once `=SHELL` is appended to it.

    Raises:
        UserError: `asked` has another form.
    """
    what, _, shell = asked.partition("=")
    if what not in ("install", "uninstall") or shell not in _INSTALL:
        raise UserError(
            f'-sc {asked}: write eval "$(lmtrain -sc install=bash)" (install or uninstall; bash or zsh), and in fish '
            f"lmtrain -sc install=fish | source"
        )
    return _INSTALL[shell].format(query=query) if what == "install" else _UNINSTALL[shell]
