"""Draws fabric.svg: what is published of collectives against what is modelled.

python docs/fabric.py [FOLDER]
"""

import sys
from pathlib import Path

from drawing import to_svg

from zayajax.planning.fabric_plots import published

TITLE = "All-reduce: published points on modelled lines"


def main(folder: Path):
    (folder / "fabric.svg").write_text(to_svg(published(), TITLE))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
