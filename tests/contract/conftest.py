"""What tests of whole runs share."""

import logging

#: as a run leaves it: pytest then hands what the logger gets to `caplog` from the first test on
logging.getLogger("libai").propagate = False
