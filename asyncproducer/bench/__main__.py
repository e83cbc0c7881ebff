"""`python -m asyncproducer.bench`: the same as `asyncproducer bench`."""

import sys

from asyncproducer.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
