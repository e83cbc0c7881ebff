"""Loggers whose handlers, the user's own code, cannot disturb what logs."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

__all__ = ["guarded"]


class _Guarded(logging.LoggerAdapter[logging.Logger]):
    """Passes all on. What a handler or a filter raises ends here: many a line is logged in the
    middle of a change that must be made whole."""

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        if not self.logger.isEnabledFor(level):
            return
        # The line of who logs, not ours nor that of the method in between.
        more["stacklevel"] = more.get("stacklevel", 1) + 1
        try:
            self.logger.log(level, msg, *args, **more)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            # As logging does with errors that its own handlers meet.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()


def guarded(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of this name, for use within a producer. Its lines never raise."""
    return _Guarded(logging.getLogger(name), {})
