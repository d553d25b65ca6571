"""Child processes that run what their parent runs.

`python -m module` looks for `module` in the working directory first. A folder `systems/` or `harness/` that
happens to lie there (another clone, another project) would then be run by the children of an installed
`bench`, under the digest of the installed code. So children are started without the working directory on
their path (`-P`), with the folder that this very package was imported from before all others unless it is
where Python looks anyway, and as optimised as their parent.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

import systems

ROOT = Path(systems.__file__).resolve().parents[1]  # the folder that `systems` was imported from


def command(module: str, python: str = sys.executable) -> tuple[str, ...]:
    """The command line that runs `module` of this project; give it `environment()` as well."""
    optimised = "-" + "O" * sys.flags.optimize if sys.flags.optimize else ""
    return (python, *filter(None, [optimised]), "-P", "-m", module)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with `changes`, in which this project is imported from `ROOT`."""
    first = [] if _installed() else [str(ROOT)]
    path = os.pathsep.join(filter(None, [*first, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **changes, **({"PYTHONPATH": path} if path else {})}


def _installed() -> bool:
    """Does every process of this Python find the project by itself? Its folder then holds other packages,
    which must not come before the standard library."""
    return str(ROOT) in map(os.path.realpath, [*site.getsitepackages(), site.getusersitepackages()])
