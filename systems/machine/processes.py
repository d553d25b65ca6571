"""Child processes that run what their parent runs.

`python -m module` looks for `module` in the working directory first. A folder `systems/` or `harness/` that
happens to lie there (another clone, another project) would then be run by the children of an installed
`bench`, under the digest of the installed code. So children are started without the working directory on
their path (`-P`), and with the folder that this very package was imported from before all others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import systems

ROOT = Path(systems.__file__).resolve().parents[1]  # the folder that `systems` was imported from


def command(module: str, python: str = sys.executable) -> tuple[str, ...]:
    """The command line that runs `module` of this project; give it `environment()` as well."""
    return (python, "-P", "-m", module)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, in which this project is imported from `ROOT`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **changes, "PYTHONPATH": path}
