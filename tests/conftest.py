import gc
import os
import random
from collections.abc import Iterator

import pytest
import torch

from tests import leftovers, ranks

leftovers.watch()


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """No test depends on which ran before it: Lightning's ``seed_everything`` leaves its seed in the environment."""
    environment = dict(os.environ)
    random.seed(0)
    torch.manual_seed(0)
    yield
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture(autouse=True)
def _nothing_left_in_stores() -> Iterator[None]:
    yield
    leftovers.refuse_leftovers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays: each collection after a test would look through all of it


def pytest_sessionfinish() -> None:
    ranks.stop_all()
