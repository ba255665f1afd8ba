"""`python -m eagle3nb` is `eagle3nb`."""

import sys

from eagle3nb.cli import main

sys.exit(main())
