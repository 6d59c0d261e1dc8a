"""`python -m fleetx.launch` is `fleetrun`."""

import sys

from fleetx.launch import main

sys.exit(main())
