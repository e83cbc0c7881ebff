"""What the fakes of the buffer pool have in common."""

from __future__ import annotations


class Undivided:
    """Memory that tells no broker's from another's."""

    @property
    def waiting(self) -> int:
        """How many wait for it."""
        return 0

    def share(self, node: int) -> None:
        """Nobody's in particular."""
        return None

    def is_held_up(self, share: None, size: int = 0) -> bool:
        """No broker is."""
        return False

    def has_better(self, share: None, size: int = 0) -> bool:
        """All are as good."""
        return False

    def move(self, share: None, node: int) -> None:
        """Nobody waits for one broker only."""

    def is_wanted(self, share: None) -> bool:
        """Whether anybody waits."""
        return self.waiting > 0
