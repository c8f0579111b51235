"""The table of settings that do not go together (config/clashes.yaml)."""

from lmtrain.config import checks, sections
from lmtrain.config.keys import keys_of
from lmtrain.config.options import OBJECTIVES, SCHEDULES
from lmtrain.losses.policy import VARIANTS
from lmtrain.losses.preferences import LOSSES
from lmtrain.objectives import distill, grpo_options, kto, mdlm, reward

OWN = (distill.DistillOptions, grpo_options.GRPOOptions, kto.KTOOptions, mdlm.MDLMOptions, reward.RewardOptions)


def test_the_table_names_keys_and_classes_that_exist() -> None:
    known = {key.name for key in (*sections.all_keys(), *(k for own in OWN for k in keys_of(own, "objective.")))}
    classes = {cls.__name__ for _, cls in OBJECTIVES.values()} | {cls.__name__ for cls in (*OWN, *SCHEDULES.values())}
    for group in checks._CLASHES:
        assert group["not"]
        whens = [clash["when"] for clash in group["not"]]
        for settings in (
            group["with"],
            *(one for when in whens for one in (when if isinstance(when, list) else [when])),
        ):
            for key, wanted in settings.items():
                values = wanted["except"] if isinstance(wanted, dict) else wanted
                names = values if isinstance(values, list) else [values]
                assert key in known or set(names) <= classes, key


def losses_of(with_class: str, key: str, value: object) -> list[str]:
    """Returns the losses that the table names beside a value of another setting."""
    groups = [group for group in checks._CLASHES if group["with"] == {"objective": with_class}]
    whens = [clash["when"] for group in groups for clash in group["not"] if isinstance(clash["when"], dict)]
    (found,) = [when["objective.loss"] for when in whens if when.get(key) == value]
    return sorted(found["except"] if isinstance(found, dict) else found)


def test_the_losses_that_the_table_names_are_those_with_the_property() -> None:
    """A loss added to losses/ is not forgotten in the table."""
    alone = sorted(name for name, variant in VARIANTS.items() if variant.baseline == "none")
    assert losses_of("GRPOOptions", "objective.group_size", 1) == alone
    in_reward = sorted(name for name, variant in VARIANTS.items() if variant.kl_in_reward)
    assert losses_of("GRPOOptions", "objective.kl_coef", "given") == in_reward
    without = sorted(name for name, loss in LOSSES.items() if not loss.has_reference)
    assert losses_of("DPOConfig", "objective.reference", {"except": ["auto", "none"]}) == without
