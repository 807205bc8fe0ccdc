"""``python -m stormtorch.cli`` is ``storm`` where the command is not on the path."""

import sys

from .main import main

sys.exit(main())
