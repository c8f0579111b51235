"""Where values come from: `python -m lmtrain.explain data.seq_len model=gpt_small`; without a key, all of them."""

import sys
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from lmtrain import cli, errors
from lmtrain.config import compose as config
from lmtrain.config import environment
from lmtrain.config.config_files import ConfigFile, composed_files, origins
from lmtrain.config.explain import unknown_key
from lmtrain.config.keys import keys_of
from lmtrain.config.override_text import typed_keys
from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.secrets import shown, shown_in
from lmtrain.terminal import visible


def explain(argv: list[str]) -> int:
    """Prints the value, origin and meaning of the keys among `argv`; other words are overrides, as for training."""
    args = cli.parse("explain", argv)
    if args.help:
        print(__doc__)
        return errors.FINISHED
    keys = [w for w in args.overrides if "=" not in w and not w.startswith("~")]
    overrides = [w for w in args.overrides if w not in keys]
    if "run_dir" in typed_keys(overrides):
        raise UserError("run_dir has no effect in `lmtrain explain`: for a run's config use --config-dir FOLDER")
    made = config.composition(overrides, args.config_dir, args.config_name)
    composed = made.tree
    environment.note(composed)
    files = composed_files(made.words, args.config_dir, args.config_name)
    known = {key.name: key for key in keys_of(Config)}
    there = [name for name in known if OmegaConf.select(composed, name, default=_ABSENT) is not _ABSENT]
    if not keys:
        _all(composed, files, overrides, there)
    for key in keys:
        value = OmegaConf.select(composed, key, default=_ABSENT)
        if value is _ABSENT:
            valid = [*known, *(str(k) for k in composed)]
            raise UserError(unknown_key(key, valid) if key not in known else f"{key} has no meaning with these options")
        if OmegaConf.is_dict(value) and key not in known:
            _table(composed, files, overrides, [name for name in there if name.startswith(f"{key}.")])
            continue
        _one(key, composed, files, overrides)
        if key in known:
            print(f"  changes   {known[key].shapes.value}")
    return errors.FINISHED


_ABSENT = object()


def _shown(value: object) -> str:
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    plain = shown_in(plain)
    return visible("null" if plain is None else str(plain).lower() if isinstance(plain, bool) else str(plain))


def _one(key: str, composed: DictConfig, files: Sequence[ConfigFile], overrides: Sequence[str]) -> None:
    found = origins(key, files, overrides)
    print(f"{key}={_shown(OmegaConf.select(composed, key))}")
    if not found:
        print("  from      a rule of lmtrain's, that follows from other keys")
        return
    *before, last = found
    refers = f": {last.text}" if "${" in last.text else ""
    print(f"  from      {last}{visible(shown(refers))}")
    for origin in reversed(before):
        print(f"  instead of {visible(shown(origin.text))} in {origin}")
    about = next((o.comment for o in reversed(found) if o.comment), "")
    if about:
        print(f"  about     {visible(about)}")


def _table(composed: DictConfig, files: Sequence[ConfigFile], overrides: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        found = origins(key, files, overrides)
        value = _shown(OmegaConf.select(composed, key))
        print(f"{key}={value}".ljust(48), f" {found[-1] if found else 'a rule'}")


def _all(composed: DictConfig, files: Sequence[ConfigFile], overrides: Sequence[str], keys: Sequence[str]) -> None:
    print("composed of, the later wins:")
    for part in files:
        print(f"  {part.package or '(root)':<12} {part.path}")
    print(f"  {'(all)':<12} the command line: {shown(' '.join(overrides)) or 'nothing'}\n")
    _table(composed, files, overrides, keys)


def main(argv: list[str] | None = None) -> int:
    return cli.plain(lambda: explain(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
