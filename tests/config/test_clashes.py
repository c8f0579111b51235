"""The table of settings that do not go together (config/clashes.yaml)."""

from lmtrain.config import checks, sections
from lmtrain.config.keys import keys_of
from lmtrain.config.options import OBJECTIVES, SCHEDULES
from lmtrain.objectives import distill, grpo_options, kto, mdlm, reward

OWN = (distill.DistillOptions, grpo_options.GRPOOptions, kto.KTOOptions, mdlm.MDLMOptions, reward.RewardOptions)


def test_the_table_names_keys_and_classes_that_exist() -> None:
    known = {key.name for key in (*sections.all_keys(), *(k for own in OWN for k in keys_of(own, "objective.")))}
    classes = {cls.__name__ for _, cls in OBJECTIVES.values()} | {cls.__name__ for cls in (*OWN, *SCHEDULES.values())}
    for group in checks._CLASHES:
        assert group["not"]
        for settings in (group["with"], *(clash["when"] for clash in group["not"])):
            for key, wanted in settings.items():
                values = wanted["except"] if isinstance(wanted, dict) else wanted
                names = values if isinstance(values, list) else [values]
                assert key in known or set(names) <= classes, key
