"""`python -m asyncproducer.spark.audit`, see docs/audit.md."""

import sys

try:
    from asyncproducer.spark.audit.command import main
except ImportError as error:
    sys.stderr.write(f'the audit cannot start ({error}): pip install "asyncproducer[audit]"\n')
    sys.exit(2)  # 1 would be a verdict

if __name__ == "__main__":
    sys.exit(main())
