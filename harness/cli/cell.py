"""One cell of a sweep: `bench run` in a process that ends when its sweep does.

    python -m harness.cli.cell ARGUMENTS OF BENCH RUN

The sweep holds the other end of standard input. Should it be killed, that end closes, and this process ends
at once: a run that goes on without its sweep would be run a second time by the next one.
"""

from __future__ import annotations

import os
import sys
import threading

from harness.cli import main
from harness.errors import INTERRUPTED


def _end_with_the_sweep() -> None:
    while os.read(0, 1):
        pass
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    main(["run", *sys.argv[1:]])
