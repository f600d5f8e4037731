"""What several test files share."""

from __future__ import annotations

import pytest
import torch

from realtime import models
from realtime.models.base import Bundle


@pytest.fixture(scope="session")
def wren() -> Bundle:
    """The embedded voice, loaded once; on one thread, as the server runs it."""
    torch.set_num_threads(1)
    return models.load("wren")
