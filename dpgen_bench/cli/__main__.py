"""`python -m dpgen_bench.cli` is `dpgen`."""

import sys

from dpgen_bench.cli import main

sys.exit(main())
