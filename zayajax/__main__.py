import sys

from zayajax.cli import main

sys.exit(main())
