"""Targets come from the request, its tenant, the model or the server, in this order."""

import math

import pytest

from baton.cluster.errors import SettingsError
from baton.cluster.settings import RouterSettings
from baton.cluster.values import TargetValues
from router.openai.errors import ApiError
from router.openai.slo import Slo, wishes
from router.targets import DefaultTargets, Targets


def defaults(**settings: object) -> DefaultTargets:
    return DefaultTargets(RouterSettings.build(**settings))


def test_nothing_is_asked_for_by_default() -> None:
    found = defaults().targets(TargetValues(), 0, "m", "")
    assert found == Targets(math.inf, math.inf, False, 0)


def test_each_level_goes_over_the_one_below_value_by_value() -> None:
    levels = defaults(
        ttft_ms=4000,
        tpot_ms=400,
        model_targets="m=2000/-",
        tenant_targets="gold=-/100/reject,free=9000/900",
    )
    assert levels.targets(TargetValues(), 0, "other", "x") == Targets(4.0, 0.4)
    assert levels.targets(TargetValues(), 0, "m", "x") == Targets(2.0, 0.4)
    assert levels.targets(TargetValues(), 0, "m", "gold") == Targets(2.0, 0.1, True)
    own = TargetValues(500, None, "best_effort")
    assert levels.targets(own, 3, "m", "gold") == Targets(0.5, 0.1, False, 3)


@pytest.mark.parametrize(
    "value", ["gold", "gold=1", "gold=0/1", "gold=x/1", "a=1/2/drop", "a=1..2/3"]
)
def test_wrong_lists_of_targets_are_refused_by_name(value: str) -> None:
    with pytest.raises(SettingsError, match="--tenant-targets must be a list such as"):
        defaults(tenant_targets=value)


def asked(headers: dict[str, str], slo: Slo | None = None):
    return wishes(headers.get, slo)


def test_headers_go_over_the_body() -> None:
    found = asked(
        {"x-baton-ttft-ms": "250", "x-baton-priority": "-2", "x-baton-tenant": "gold"},
        Slo(ttft_ms=900.0, tpot_ms=40.0, policy="reject"),
    )
    assert found.targets == TargetValues(250.0, 40.0, "reject")
    assert (found.priority, found.tenant, found.explain) == (-2, "gold", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-baton-ttft-ms", "0"),
        ("x-baton-ttft-ms", "soon"),
        ("x-baton-tpot-ms", "nan"),
        ("x-baton-tpot-ms", "-5"),
        ("x-baton-tpot-ms", "1e99"),
        ("x-baton-priority", "1.5"),
        ("x-baton-priority", "101"),
        ("x-baton-tenant", ""),
        ("x-baton-tenant", "a b"),
        ("x-baton-explain", "yes"),
    ],
)
def test_a_wrong_header_is_named(name: str, value: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked({name: value})
    assert caught.value.status == 400
    assert caught.value.param == name and caught.value.message.startswith(f"{name} must be ")
