from collections.abc import Iterator

import pytest
import torch

from tests import leftovers, ranks

leftovers.watch()


@pytest.fixture(autouse=True)
def _nothing_left_in_stores() -> Iterator[None]:
    yield
    leftovers.refuse_leftovers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish() -> None:
    ranks.stop_all()
