"""``python -m stormtorch.cli`` runs ``storm`` if the command is not on the path."""

import sys

from .main import main

sys.exit(main())
