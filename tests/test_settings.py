"""Settings without a flag: each is described, and none is described that is not there."""

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest

from specctl.cli.eval import evaluate
from specctl.cli.extract import extract
from specctl.cli.regenerate import _regenerate
from specctl.cli.train import train
from specctl.records.evaluation import EvalConfig
from specctl.records.extraction import ExtractConfig
from specctl.records.regeneration import RegenerateConfig
from specctl.records.settings import BEYOND_FLAGS
from specctl.records.training import TrainConfig


@pytest.mark.parametrize(
    ("command", "kind", "call"),
    [
        ("regenerate", RegenerateConfig, _regenerate),
        ("extract", ExtractConfig, extract),
        ("train", TrainConfig, train),
        ("eval", EvalConfig, evaluate),
    ],
)
def test_every_setting_has_a_flag_or_a_description(command: str, kind: type, call: Callable[..., object]) -> None:
    flags = set(inspect.signature(call).parameters)
    assert {field.name for field in fields(kind)} - flags == set(BEYOND_FLAGS[command])
