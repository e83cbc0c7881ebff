"""`python -m asyncproducer`: the same as the `asyncproducer` command."""

import sys

from asyncproducer.cli import main

if __name__ == "__main__":
    sys.exit(main())
