"""`python -m forebay`: the `forebay` program."""

import os
import sys

from forebay._cli import folders, program_path

program = program_path()
if program is None:
    tried = ", ".join(map(str, folders()))
    sys.exit(f"forebay: the program is in none of {tried}; install the wheel again, or call the program by its path")
os.execv(program, ["forebay", *sys.argv[1:]])
