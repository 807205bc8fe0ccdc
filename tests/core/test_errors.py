from __future__ import annotations

import errno
import logging
import pickle

import pytest

from stormtorch.core.errors import OutOfBudget, StorageError, StormError
from stormtorch.core.notices import say_once


def test_an_out_of_budget_error_has_four_parts_in_one_line_and_survives_pickling() -> None:
    error = OutOfBudget("Cannot reserve 2 B", "1 B of 2 B used", "The limit is vram='2B'.", "Raise it.")
    assert str(error) == "Cannot reserve 2 B (1 B of 2 B used). The limit is vram='2B'. Raise it."
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert isinstance(again, StormError)
    assert isinstance(again, MemoryError)


def test_a_storage_error_keeps_its_errno_through_pickling() -> None:
    error = StorageError("Cannot read a.bin")
    error.errno = errno.EIO
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errno) == ("Cannot read a.bin", errno.EIO)


def test_a_notice_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stormtorch"):
        assert say_once("the disk is slow", key="disk")
        assert not say_once("the disk is slow again", key="disk")
    assert caplog.messages == ["the disk is slow"]
