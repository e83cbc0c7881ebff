"""Lines of the log that cannot disturb whoever writes them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asyncproducer.logs import guarded


class Broken(logging.Handler):
    """A user's own."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error("broken")


def broken(monkeypatch: pytest.MonkeyPatch, name: str, error: type[BaseException]) -> None:
    monkeypatch.setattr(logging.getLogger(name), "handlers", [Broken(error)])


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, GeneratorExit])
def test_what_a_handler_raises_is_shown_and_goes_no_further(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[BaseException]
) -> None:
    broken(monkeypatch, "test.logs", error)
    guarded("test.logs").warning("line")
    assert f"{error.__name__}: broken" in capsys.readouterr().err
    monkeypatch.setattr(logging, "raiseExceptions", False)
    guarded("test.logs").warning("line")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_handler_may_end_the_program(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    broken(monkeypatch, "test.logs", error)
    with pytest.raises(error):
        guarded("test.logs").warning("line")


def test_a_line_is_where_it_was_written(caplog: pytest.LogCaptureFixture) -> None:
    logger = guarded("test.logs")
    with caplog.at_level(logging.INFO):
        logger.debug("not this one")
        logger.info("%d of %d", 1, 2)
        try:
            raise KeyError("why")
        except KeyError:
            logger.exception("an error")
    first, second = caplog.records
    assert [record.getMessage() for record in caplog.records] == ["1 of 2", "an error"]
    assert {first.funcName, second.funcName} == {"test_a_line_is_where_it_was_written"}
    assert second.exc_info is not None
    assert second.exc_info[0] is KeyError
