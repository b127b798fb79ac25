"""``python -m unicron.cli``: the same as the command ``unicron``."""

import sys

from unicron.cli import main

sys.exit(main())
