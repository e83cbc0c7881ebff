"""`python examples/orders_pipeline`: see README.md."""

import sys
from pathlib import Path

# Started as a directory, Python looks for modules in it; the package is the directory itself.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from orders_pipeline.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
